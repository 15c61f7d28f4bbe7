"""Reads checkpoints of Hugging Face and Meta, one tensor at a time (canonical names: exporter/model/weights.py)."""
