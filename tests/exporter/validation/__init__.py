"""Tests of `exporter/validation/`."""
