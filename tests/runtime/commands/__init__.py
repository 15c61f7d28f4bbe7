"""Tests of `runtime/commands/`."""
