"""Tests of `runtime/text/`."""
