"""Tests of `exporter/checkpoint/`."""
