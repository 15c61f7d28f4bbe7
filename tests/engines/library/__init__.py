"""Tests of `engines/library/`."""
