"""The full-size Llama 3 8B block at fp16: export, validation, and decode at P = 1,000 → L = 1,001."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights, RoundedWeights
from exporter.spec.catalogue import CATALOGUE
from exporter.spec.feeds import step_feeds
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.validation.tolerances import tolerance
from runtime import DecodeSession

pytestmark = pytest.mark.slow


def test_llama3_8b_block(tmp_path):
    config = CATALOGUE["llama3-8b"]
    unit = Unit.parse("block", config)
    weights = RandomWeights(config, 0)
    bundle = export_bundle(ExportRequest(config, unit, weights), tmp_path / "bundle")
    assert bundle.read_report()["validation"]["passed"]
    assert bundle.manifest.files["model.onnx.data"]["size_bytes"] >= 2 * 218_112_000

    x = np.random.default_rng(0).standard_normal((1, 1001, 4096)).astype(np.float16)
    with DecodeSession.open(bundle.folder, max_batch=1) as session:
        session.prefill(x[:, :1000])
        assert session.lengths.tolist() == [1000]
        out = session.decode(x[:, 1000:])
        assert out.shape == (1, 1, 4096) and out.dtype == np.float16 and session.lengths.tolist() == [1001]
        keys = session._cache.arrays[0]
        assert keys.shape == (1, 8, 2048, 128) and keys[0, :, 1000].any() and not keys[0, :, 1001:].any()

    reference = EagerStepper.from_weights(bundle.manifest.spec.in_dtype("fp32"), RoundedWeights(weights, "fp16"))
    cache = reference.new_cache(1, 1008)
    step = [np.array([n], np.int64) for n in (0, 1000, 1)]
    reference.run(step_feeds("hidden_states", x[:, :1000], step[0], step[1]), cache)
    expected = reference.run(step_feeds("hidden_states", x[:, 1000:], step[1], step[2]), cache)["hidden_states_out"]
    error = np.abs(out.astype(np.float32) - expected).max() / np.sqrt((expected**2).mean())
    assert error <= tolerance(("eager", "onnxruntime"), unit, "fp16").allowed
