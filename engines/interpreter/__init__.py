"""A parsed TensorRT network executed on the CPU: what the parser understood, in numbers, on a machine without a GPU."""
