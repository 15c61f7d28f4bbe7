"""From a bundle to TensorRT engines. Importing this package needs no TensorRT."""
