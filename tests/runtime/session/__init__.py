"""Tests of `runtime/session/`."""
