"""Tests of `exporter/spec/`."""
