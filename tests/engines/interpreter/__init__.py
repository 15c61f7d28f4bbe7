"""Tests of `engines/interpreter/`."""
