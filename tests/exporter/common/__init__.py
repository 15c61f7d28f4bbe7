"""Tests of `exporter/common/`."""
