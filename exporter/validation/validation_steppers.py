"""The two sides of a comparison: the reference's weights, and a bundle in onnxruntime as it can be compared there."""

from __future__ import annotations

from pathlib import Path

from exporter.bundle.bundle import Bundle
from exporter.graph.float32_twin import float32_twin
from exporter.graph.quantize import QuantizedWeights
from exporter.graph.weight_reader import bundle_weights
from exporter.model.weights import RoundedWeights, WeightSource
from exporter.steppers.growing_stepper import GrowingStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper


def reference_weights(bundle: Bundle, weights: WeightSource | None = None) -> WeightSource:
    """What a bundle's reference computes with: weights as the bundle has them, widened to float32.

    Args:
        bundle: of any dtype and weight format.
        weights: where they came from; None takes the bundle's own, which cannot show that they were written wrongly.
    """
    manifest = bundle.manifest
    if weights is None:
        weights = bundle_weights(bundle)
    elif manifest.weight_format is not None:
        weights = QuantizedWeights(weights, manifest.weight_format, manifest.dtype, manifest.config.tie_word_embeddings)
    return RoundedWeights(weights, manifest.dtype)


def open_onnxruntime(bundle: Bundle, scratch: Path, growing: bool = False) -> Stepper:
    """A bundle in onnxruntime on the CPU as it can be compared there: in parts as one, a bf16 one as its float32 twin.

    Args:
        bundle: of any dtype.
        scratch: a folder for twins, which must outlive the stepper.
        growing: whether its cache grows.
    """

    def open_part(part: Bundle) -> Stepper:
        manifest, path = part.manifest, part.graph_path
        if manifest.dtype == "bf16":
            path = float32_twin(part.folder, scratch)
        dtype = "fp32" if manifest.dtype == "bf16" else manifest.dtype
        if growing:
            return GrowingStepper(str(path), manifest.spec.in_place().in_dtype(dtype).contract)
        return OnnxruntimeStepper(str(path), manifest.contract.in_dtype(manifest.dtype, dtype), dtype)

    stepper = open_parts(bundle, open_part)
    if bundle.manifest.dtype == "bf16" and bundle.manifest.parts:
        stepper.contract = bundle.manifest.contract.in_dtype("bf16", "fp32")
    return stepper
