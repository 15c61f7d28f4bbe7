"""Steppers run one step of one graph on given buffers, and nothing else. Validation, comparison and runtime drive the same ones."""
