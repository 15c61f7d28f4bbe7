"""Tests of `runtime/doctor/`."""
