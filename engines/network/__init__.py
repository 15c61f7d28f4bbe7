"""The ONNX file of a build, the network that TensorRT parses from it, and the shapes and options of the build."""
