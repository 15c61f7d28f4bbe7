"""Tests of `exporter/placing/`."""
