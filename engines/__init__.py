"""Builds TensorRT engines from bundles, runs them and compares them. Importing this package needs no TensorRT."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library logs only where its user asks for it
