"""From a checkpoint to a bundle: the eager definition, its ONNX graph, and the proof that both mean the same.

Importing this package loads nothing heavy; the modules that need torch import it themselves.
"""

__version__ = "0.1.0"
