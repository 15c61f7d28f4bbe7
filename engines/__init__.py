"""From a bundle to TensorRT engines. Importing this package needs no TensorRT."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is quiet until its user listens
