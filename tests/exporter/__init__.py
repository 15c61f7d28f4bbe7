"""Tests of `exporter/`."""
