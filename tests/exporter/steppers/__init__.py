"""Tests of the steppers."""
