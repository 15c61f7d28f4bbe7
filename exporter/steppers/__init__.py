"""Steppers: each runs one step of one graph on given buffers. Validation, comparison and runtime use the same ones."""
