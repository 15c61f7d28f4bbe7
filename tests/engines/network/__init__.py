"""Tests of `engines/network/`."""
