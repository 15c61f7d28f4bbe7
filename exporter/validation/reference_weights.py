"""The weights that a bundle's reference computes with."""

from __future__ import annotations

from exporter.bundle.bundle import Bundle
from exporter.graph.quantize import QuantizedWeights
from exporter.graph.weight_reader import bundle_weights
from exporter.model.weights import RoundedWeights, WeightSource


def reference_weights(bundle: Bundle, weights: WeightSource | None = None) -> WeightSource:
    """Returns the weights as the bundle stores them, quantized and rounded like its own, widened to float32.

    Args:
        bundle: a bundle in any dtype and any format of weights.
        weights: the source that the bundle was made from. None takes the bundle's own weights; an error that was made
            when they were written then stays hidden.
    """
    manifest = bundle.manifest
    if weights is None:
        weights = bundle_weights(bundle)
    elif manifest.weight_format is not None:
        weights = QuantizedWeights(weights, manifest.weight_format, manifest.dtype, manifest.config.tie_word_embeddings)
    return RoundedWeights(weights, manifest.dtype)
