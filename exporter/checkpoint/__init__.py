"""Checkpoints in the formats people have, read as canonical weights (see exporter/model/weights.py) one tensor at a time."""
