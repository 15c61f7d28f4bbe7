"""Tests of `exporter/graph/`."""
