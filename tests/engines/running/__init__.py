"""Tests of `engines/running/`."""
