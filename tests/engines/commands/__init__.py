"""Tests of `engines/commands/`."""
