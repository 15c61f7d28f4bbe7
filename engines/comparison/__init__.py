"""Compares backends with each other, operation by operation, and reports the result."""
