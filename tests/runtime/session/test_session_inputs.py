"""Wrong inputs and options: a session refuses them with the same message on every backend, and nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.common.errors import BackendError, InputError
from exporter.spec.dtypes import numpy_dtype
from runtime import DecodeSession
from tests.conftest import MAX_POSITIONS
from tests.support.row_sessions import BACKENDS, open_session, state, tokens, unchanged

MODEL_FAULTS = [
    (lambda s: s.prefill(np.array([[1, 101]])), "got 101 in row 0 at 1, expected 0 to 100"),
    (lambda s: s.prefill(np.array([[-1]])), "got -1"),
    (lambda s: s.prefill(np.array([[1.0]])), "float64"),
    (lambda s: s.prefill(np.array([1, 2])), r"\[2\], expected integers \[B, T\]"),
    (lambda s: s.prefill(np.zeros((1, 0), int)), "at least one"),
    (lambda s: s.prefill(tokens(5, 1)), "at most 4"),
    (lambda s: s.prefill(tokens(2, 3), [3]), r"expected integers \[2\]"),
    (lambda s: s.prefill(tokens(2, 3), [0, 3]), "expected 1 to 3"),
    (lambda s: s.prefill(tokens(2, 3), [4, 3]), "expected 1 to 3"),
    (lambda s: s.prefill(tokens(2, 3), [1.0, 2.0]), "float64"),
    (lambda s: s.prefill(tokens(2, 3), "ab"), "lengths: got <U2"),
    (lambda s: s.prefill(None), "tokens: got object"),
    (lambda s: s.prefill(torch.zeros(1, 2, requires_grad=True)), r"asks for its gradient; give tensor\.detach"),
    (lambda s: s.decode(None), "tokens: got object"),
    (lambda s: s.prefill(np.ma.masked_equal([[1, 2]], 2)), "input: got an array with masked elements"),
    (lambda s: s.prefill([np.ma.masked_equal([1, 2], 2)]), "input: got an array with masked elements"),
    (lambda s: s.prefill([[1, np.ma.masked]]), "input: got an array with masked elements"),
    (lambda s: s.prefill(tokens(2, 3), np.ma.masked_equal([1, 2], 2)), "lengths: got an array with masked elements"),
    (lambda s: s.decode(np.ma.masked_equal([1, 2], 2)), "input: got an array with masked elements"),
    (lambda s: s.decode(tokens(1, 2)), "expected 1; use prefill"),
    (lambda s: s.prefill(tokens(1, 65)), "holds 0 of 64 tokens and was asked for 65 more"),
]


@pytest.mark.parametrize(("call", "message"), MODEL_FAULTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_is_refused_the_same_way_on_every_backend(tiny_bundle, backend, call, message):
    with open_session(tiny_bundle("model"), backend, cache_capacity=64) as session:
        before = state(session)
        with pytest.raises(InputError, match=message):
            call(session)
        unchanged(session, before)
        session.prefill(tokens(2, 3))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 2, 64), np.float32), "got float32 .* expected fp16"),
        (np.zeros((1, 2, 63), np.float16), r"\[1, 2, 63\], expected fp16 \[B, T, 64\]"),
        (np.zeros((1, 64), np.float16), "expected fp16"),
        (np.zeros((1, 2), np.int64), "expected fp16"),
    ],
)
def test_hidden_states_must_have_the_bundles_dtype_and_shape(tiny_bundle, x, message):
    with open_session(tiny_bundle("block", "fp16")) as session, pytest.raises(InputError, match=message):
        session.prefill(x)


def test_bfloat16_hidden_states_of_torch_are_taken_as_those_of_numpy(tiny_bundle):
    x = torch.linspace(-1, 1, 4 * 64).reshape(64, 4).T[None].bfloat16()  # its axes are not contiguous
    as_numpy = x.float().numpy().astype(numpy_dtype("bf16"))
    with open_session(tiny_bundle("block", "bf16"), "eager") as session:
        expected = session.prefill(as_numpy)
        session.reset()
        np.testing.assert_array_equal(session.prefill(x), expected)
        with pytest.raises(InputError, match="detach"):
            session.prefill(x.requires_grad_())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "tensorflow"}, InputError, "expected one of auto"),
        ({"providers": "FooExecutionProvider"}, BackendError, "FooExecutionProvider"),
        ({"providers": ["CPUExecutionProvider", "CUDAExecutionProvider"]}, InputError, "silent fallback"),
        ({"backend": "eager", "providers": "CPUExecutionProvider"}, InputError, "eager"),
        ({"max_batch": 0}, InputError, "max_batch"),
        ({"cache_capacity": 0}, InputError, "cache_capacity"),
        ({"cache_capacity": MAX_POSITIONS + 1}, InputError, f"at most {MAX_POSITIONS}"),
        ({"verify": "no"}, InputError, "verify"),
        ({"max_batch": "4"}, InputError, "max_batch: got '4'"),
        ({"max_batch": True}, InputError, "max_batch: got True"),
        ({"max_batch": 2.0}, InputError, "max_batch: got 2.0"),
        ({"max_batch": np.True_}, InputError, "max_batch: got True"),
        ({"cache_capacity": np.True_}, InputError, "cache_capacity: got True"),
        ({"cache_capacity": np.float64(8)}, InputError, "cache_capacity: got 8.0"),
        ({"cache_capacity": "8"}, InputError, "cache_capacity: got '8'"),
        ({"providers": 5}, InputError, "providers: got 5"),
        ({"providers": 0}, InputError, "providers: got 0"),
        ({"providers": False}, InputError, "providers: got False"),
        ({"providers": ""}, BackendError, "provider"),
        ({"providers": [["CPUExecutionProvider"]]}, InputError, r"providers: got \[\['CPU"),
        ({"backend": None}, InputError, "backend: got None"),
    ],
)
def test_bad_options_are_refused(tiny_bundle, options, error, message):
    with pytest.raises(error, match=message):
        DecodeSession.open(tiny_bundle("model").folder, **options)


@pytest.mark.parametrize("folder", [None, 5, b"bundle", ["bundle"], ""])
def test_a_bundle_that_is_no_path_is_refused(folder):
    with pytest.raises(InputError, match=r"bundle: got .*, expected the path of its folder"):
        DecodeSession.open(folder)


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.array, torch.tensor])
def test_sizes_are_taken_from_whole_numbers_of_every_type(tiny_bundle, kind):
    with DecodeSession.open(tiny_bundle("model").folder, max_batch=kind(2), cache_capacity=kind(8)) as session:
        assert type(session.max_batch) is int and type(session.cache_capacity) is int
        assert (session.max_batch, session.cache_capacity) == (2, 8)


def test_a_masked_array_without_masked_elements_is_an_array(tiny_bundle):
    with open_session(tiny_bundle("model")) as session:
        expected = session.prefill(tokens(2, 3))
        session.reset()
        np.testing.assert_array_equal(session.prefill(np.ma.masked_array(tokens(2, 3))), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_of_one_token_need_no_axis_for_it(tiny_bundle, backend):
    x = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    with open_session(tiny_bundle("block"), backend, cache_capacity=64) as session:
        session.prefill(x)
        expected = session.decode(x[:, :1])
        session.reset()
        session.prefill(x)
        got = session.decode(x[:, 0])
        assert expected.shape == (2, 1, 64) and got.shape == (2, 64)
        np.testing.assert_array_equal(got, expected[:, 0])
        assert session.lengths.tolist() == [6, 6]
        for wrong in (x[:, 0, :63], x[0, 0], x[:, :2], x[:, 0].astype(np.float16), x[:, :1, 0]):
            with pytest.raises(InputError):
                session.decode(wrong)
        assert session.lengths.tolist() == [6, 6]


def test_auto_takes_onnxruntime_and_says_so(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder) as session:
        assert session.backend == "onnxruntime" and "CPUExecutionProvider" in session.description


def test_bf16_on_onnxruntime_is_refused_by_name_and_eager_decodes_it(tiny_bundle):
    with pytest.raises(BackendError, match="bf16"):
        open_session(tiny_bundle("model", "bf16"))
    with open_session(tiny_bundle("model", "bf16"), "eager") as session:
        assert session.prefill(tokens(2, 3)).dtype == np.float32


def test_a_component_cannot_be_decoded(tiny_bundle):
    with pytest.raises(InputError, match="no cache"):
        DecodeSession.open(tiny_bundle("component:rms_norm").folder)
