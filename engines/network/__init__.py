"""An ONNX file as TensorRT understands it, and the shapes and options it is built with."""
