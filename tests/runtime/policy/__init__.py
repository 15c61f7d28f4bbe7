"""Tests of `runtime/policy/`."""
