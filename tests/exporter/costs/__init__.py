"""Tests of `exporter/costs/`."""
