"""Runs engines: device caches, CUDA graphs, and several engines as one model."""
