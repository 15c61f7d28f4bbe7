"""Doubles of the libraries that need a GPU: CUDA, its runtime, and TensorRT-RTX."""
