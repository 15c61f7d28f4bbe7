"""Builds an engine file and its record from a bundle or an ONNX file, and changes the weights of an engine."""
