"""Tests of `exporter/model/`."""
