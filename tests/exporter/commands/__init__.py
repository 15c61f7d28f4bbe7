"""Tests of `exporter/commands/`."""
