"""The ONNX graph: traced, assembled, filled with weights, checked, and read back."""
