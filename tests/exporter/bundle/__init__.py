"""Tests of `exporter/bundle/`."""
