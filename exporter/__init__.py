"""Turns a checkpoint into a bundle: the eager definition, its ONNX graph, and the comparison of both.

Importing this package is fast: the modules that need torch import it themselves.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library prints no log by default

__version__ = "0.1.0"
