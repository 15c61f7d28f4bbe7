"""Token-level agreement: its arithmetic, and the real model against transformers on every backend that runs here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.own.token_agreement import transformers_greedy
from engines.interpreter.stepper import InterpreterStepper
from exporter.bundle.tokenizer import encode, open_tokenizer
from exporter.measuring.agreement import forced_logits, greedy_logits, measure_agreement, prompts
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.validation.tolerances import agreement_floor

pytestmark = pytest.mark.slow

N_PROMPTS, N_TOKENS, CAPACITY = 4, 8, 64


def test_known_distributions_have_known_figures():
    logits = np.log(np.array([[[0.5, 0.25, 0.25]] * 4]))
    other = np.log(np.array([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]]))
    same = measure_agreement(logits, logits + 3.0)  # a constant changes no distribution
    assert (same.top1, same.greedy_length, same.kl) == (1.0, 4.0, pytest.approx(0, abs=1e-12))
    got = measure_agreement(logits, other)
    assert (got.top1, got.greedy_length, got.shortest_greedy_length) == (0.5, 1.0, 1)
    assert got.largest_kl == pytest.approx(0.25 * math.log(2)) and got.kl == pytest.approx(0.125 * math.log(2))


def test_forcing_a_backends_own_tokens_gives_its_own_logits(tiny_bundle):
    stepper = OnnxruntimeStepper.from_bundle(tiny_bundle("model", "fp32"))
    encoded = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    tokens, logits = greedy_logits(stepper, encoded, 6, 16)
    np.testing.assert_allclose(forced_logits(stepper, encoded, tokens, 16), logits, atol=1e-5)
    for row, prompt in enumerate(encoded):  # ragged in a batch as alone
        alone, _ = greedy_logits(stepper, [prompt], 6, 16)
        assert alone[0].tolist() == tokens[row].tolist()


def test_the_prompts_are_fixed_distinct_lines():
    lines = prompts()
    assert len(lines) == len(set(lines)) >= 16 and all(line == line.strip() and line for line in lines)


@pytest.fixture(scope="module")
def oracle(smollm2_checkpoint, smollm2_bundle):
    encoded = [encode(open_tokenizer(smollm2_bundle("fp32")), prompt) for prompt in prompts()[:N_PROMPTS]]
    return encoded, *transformers_greedy(smollm2_checkpoint, encoded, N_TOKENS)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("fp32", OnnxruntimeStepper),
        ("fp16", OnnxruntimeStepper),
        ("fp32", InterpreterStepper),
        ("fp16", InterpreterStepper),
    ],
)
def test_the_real_model_agrees_with_transformers(oracle, smollm2_bundle, dtype, backend):
    encoded, tokens, logits = oracle
    stepper = backend.from_bundle(smollm2_bundle(dtype))
    got = measure_agreement(logits, forced_logits(stepper, encoded, tokens, CAPACITY))
    floor = agreement_floor(dtype)
    assert got.top1 >= floor.top1 and got.largest_kl <= floor.largest_kl, got


def test_a_wrong_rotation_would_be_noticed(oracle, smollm2_bundle, tmp_path):
    from tests.support.planted_faults import doctored, half_split_rope

    encoded, tokens, logits = oracle
    broken = doctored(smollm2_bundle("fp32"), tmp_path / "broken", lambda model: half_split_rope(model, 0))
    got = measure_agreement(logits, forced_logits(OnnxruntimeStepper.from_bundle(broken), encoded, tokens, CAPACITY))
    floor = agreement_floor("fp32")
    assert got.top1 < floor.top1 and got.largest_kl > floor.largest_kl
