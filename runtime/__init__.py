"""Decoding from a bundle: sessions that own the KV cache. Importing this package and decoding on onnxruntime load no torch."""

from runtime.session import DecodeSession

__all__ = ["DecodeSession"]
