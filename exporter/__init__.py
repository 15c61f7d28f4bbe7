"""From a checkpoint to a bundle: the eager definition, its ONNX graph, and the proof that both mean the same.

Importing this package loads nothing heavy; the modules that need torch import it themselves.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is quiet until its user listens

__version__ = "0.1.0"
