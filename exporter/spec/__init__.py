"""What a graph is, as plain data: geometry, dtypes, units, tensor names and limits. No torch, no onnx."""
