"""Tests of `exporter/measuring/`."""
