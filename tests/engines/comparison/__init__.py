"""Tests of `engines/comparison/`."""
