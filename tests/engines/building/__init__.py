"""Tests of `engines/building/`."""
