"""Decoding from a bundle, in sessions that own the KV cache. Import and decoding on onnxruntime load no torch."""

import logging

from runtime.session import DecodeSession
from runtime.state import SlotState

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library logs nothing unless its user asks for it

__all__ = ["DecodeSession", "SlotState"]
