"""Runs a parsed TensorRT network on the CPU with PyTorch, so that its results can be checked without a GPU."""
