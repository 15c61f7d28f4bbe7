"""Decoding from a bundle: sessions that own the KV cache. Importing this package and decoding on onnxruntime load no torch."""

import logging

from runtime.session import DecodeSession

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is quiet until its user listens

__all__ = ["DecodeSession"]
