"""Tests of `engines/`."""
