"""The interpreter: each kind of layer compared with numpy, in networks that the test builds, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch

from engines.interpreter.layers import LAYERS
from engines.interpreter.program import read_program
from engines.interpreter.reading import Unsupported
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from engines.library.tensorrt_logger import create_logger
from engines.network.network_checks import KNOWN_LAYERS
from engines.network.parsed import NetworkTensor, ParsedNetwork
from exporter.common.errors import CheckFailed
from exporter.graph.weight_reader import bundle_weights
from exporter.model.observe import unseen
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.feeds import step_feeds
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from tests.support.planted_faults import doctored, node_of

H, K, D = 4, 2, 16


class Network:
    """A TensorRT network built layer by layer and then interpreted."""

    def __init__(self) -> None:
        self.logger = create_logger(trt)
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(0)
        self.names: list[str] = []

    def input(self, name: str, dtype, shape):
        self.names.append(name)
        return self.network.add_input(name, dtype, shape)

    def run(self, layer_or_tensor, **inputs) -> np.ndarray:
        tensor = layer_or_tensor if isinstance(layer_or_tensor, trt.ITensor) else layer_or_tensor.get_output(0)
        self.network.mark_output(tensor)
        parsed = ParsedNetwork(choose_backend("tensorrt-rtx"), self.builder, self.network, None, self.logger)
        parsed.inputs = tuple(NetworkTensor(name, "", ()) for name in self.names)
        program = read_program(parsed, lambda name: pytest.fail(f"no initializer {name}"))
        return program.run({name: torch.from_numpy(x) for name, x in inputs.items()}, unseen)[tensor.name].numpy()


def test_every_layer_kind_that_our_graphs_parse_to_is_known():
    assert set(LAYERS) | {"CONSTANT", "ATTENTION_INPUT", "ATTENTION_OUTPUT", "NORMALIZATION"} == KNOWN_LAYERS


def test_half_is_rounded_after_every_layer():
    network = Network()
    x = network.input("x", trt.float16, (1,))
    one = network.network.add_constant((1,), np.ones(1, np.float16)).get_output(0)
    first = network.network.add_elementwise(x, one, trt.ElementWiseOperation.SUM).get_output(0)
    second = network.network.add_elementwise(first, one, trt.ElementWiseOperation.SUM)
    assert network.run(second, x=np.array([2048], np.float16)) == 2048  # 2049 is no half: float32 would arrive at 2050


def test_a_matrix_product_accumulates_in_float32_and_is_rounded_once():
    network = Network()
    a, b = network.input("a", trt.float16, (1, 4096)), network.input("b", trt.float16, (1, 4096))
    layer = network.network.add_matrix_multiply(a, trt.MatrixOperation.NONE, b, trt.MatrixOperation.TRANSPOSE)
    ones = np.ones((1, 4096), np.float16)
    assert network.run(layer, a=ones, b=ones) == 4096  # sums in half stop at 2048


def attention_network(network: Network, length: int, causal=None, masked=False, lengths=False):
    queries = network.input("q", trt.float16, (2, H, -1, D))
    keys, values = (network.input(name, trt.float16, (2, K, length, D)) for name in ("k", "v"))
    attention = network.network.add_attention(queries, keys, values, trt.AttentionNormalizationOp.SOFTMAX, False)
    if causal is not None:
        attention.causal_kind = causal
    if masked:
        attention.mask = network.input("mask", trt.bool, (2, 1, -1, length))
    if lengths:
        attention.key_value_lengths = network.input("lengths", trt.int32, (2,))
    return attention.get_output(0)


def expected_attention(q, k, v, visible):
    k, v = (np.repeat(x.astype(np.float64), H // K, axis=1) for x in (k, v))
    scores = np.where(visible, q.astype(np.float64) @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("form", ["mask", "upper left", "lower right", "lengths"])
def test_attention_means_what_its_properties_say(form):
    T, L = 3, 7
    rng = np.random.default_rng(0)
    q = (rng.standard_normal((2, H, T, D)) / 4).astype(np.float16)
    k, v = (rng.standard_normal((2, K, L, D)).astype(np.float16) for _ in range(2))
    j, t = np.arange(L), np.arange(T)[:, None]
    network, extra = Network(), {}
    if form == "mask":
        visible = rng.random((2, 1, T, L)) < 0.6
        visible[..., 0] = True
        out, extra = attention_network(network, L, masked=True), {"mask": visible}
    elif form == "lengths":
        visible = (j < np.array([4, 7])[:, None])[:, None, None]
        out, extra = attention_network(network, L, lengths=True), {"lengths": np.array([4, 7], np.int32)}
    else:
        kind = trt.CausalMaskKind.UPPER_LEFT if form == "upper left" else trt.CausalMaskKind.LOWER_RIGHT
        visible = j <= t + (0 if form == "upper left" else L - T)
        out = attention_network(network, L, kind)
    got = network.run(out, q=q, k=k, v=v, **extra)
    np.testing.assert_allclose(got, expected_attention(q, k, v, visible), atol=3e-3)


def test_uniform_attention_shows_which_way_a_mask_is_aligned():
    """I8 of CASES.md: zero queries, P = 3, T = 2, V_j = j: 1.5 and 2.0; 0 and 0.5 from the upper left."""
    for kind, means in ((trt.CausalMaskKind.LOWER_RIGHT, (1.5, 2.0)), (trt.CausalMaskKind.UPPER_LEFT, (0.0, 0.5))):
        network = Network()
        out = attention_network(network, 5, kind)
        v = np.broadcast_to(np.arange(5, dtype=np.float16)[:, None], (2, K, 5, D)).copy()
        got = network.run(out, q=np.zeros((2, H, 2, D), np.float16), k=np.ones((2, K, 5, D), np.float16), v=v)
        np.testing.assert_allclose(got[..., 0], np.broadcast_to(means, (2, H, 2)), atol=1e-3)


def test_a_query_that_sees_nothing_is_not_made_to_look_right():
    network = Network()
    out = attention_network(network, 4, masked=True)
    shapes = {"q": (2, H, 1, D), "k": (2, K, 4, D), "v": (2, K, 4, D)}
    got = network.run(
        out, mask=np.zeros((2, 1, 1, 4), bool), **{name: np.ones(shape, np.float16) for name, shape in shapes.items()}
    )
    assert np.isnan(got).all()


@pytest.mark.parametrize("kind", [EagerStepper, OnnxruntimeStepper, InterpreterStepper])
def test_rms_norm_in_a_half_precision_graph_has_float32_statistics(tiny_bundle, kind):
    """x = 300 everywhere: its square overflows in half, and the output is the weight; a zero row stays zero."""
    bundle = tiny_bundle("component:rms_norm", "fp16")
    x = np.zeros((1, 2, 64), np.float16)
    x[0, 0] = 300
    (y,) = kind.from_bundle(bundle).run({"x": x}).values()
    weight = bundle_weights(bundle).read("blocks.0.attention_norm.weight").numpy()
    np.testing.assert_array_equal(y[0, 0], weight)
    assert not y[0, 1].any()


def test_cache_rows_out_of_range_are_ignored_and_the_others_written_in_place():
    network = Network()
    cache = network.input("cache", trt.float16, (3, K, 8, D))
    update, indices = network.input("update", trt.float16, (3, K, -1, D)), network.input("indices", trt.int32, (3,))
    layer = network.network.add_kv_cache_update(cache, update, indices, trt.KVCacheMode.LINEAR)
    before = np.zeros((3, K, 8, D), np.float16)
    new = np.arange(1, 4, dtype=np.float16)[:, None] * np.ones((3, K, 3, D), np.float16)
    got = network.run(layer, cache=before, update=new, indices=np.array([6, -2, 9], np.int32))
    assert np.shares_memory(got, before)
    assert got[:, 0, :, 0].tolist() == [[0, 0, 0, 0, 0, 0, 1, 2], [3, 0, 0, 0, 0, 0, 0, 0], [0] * 8]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_pairs_what_its_property_says(interleaved):
    network = Network()
    x = network.input("x", trt.float32, (1, 1, 2, 4))
    cos, sin = (network.input(name, trt.float32, (1, 2, 2)) for name in ("cos", "sin"))
    layer = network.network.add_rotary_embedding(x, cos, sin, interleaved, 0)
    angles = np.array([[[0.3, 0.5], [0.6, 1.0]]], np.float32)
    values = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    got = network.run(layer, x=values, cos=np.cos(angles), sin=np.sin(angles))
    pairs = values.reshape(2, 2, 2) if interleaved else values.reshape(2, 2, 2).swapaxes(1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles[0])
    parts = np.stack([turned.real, turned.imag], -1)
    expected = parts.reshape(2, 4) if interleaved else parts.swapaxes(1, 2).reshape(2, 4)
    np.testing.assert_allclose(got[0, 0], expected, atol=1e-5)


def test_layers_listed_before_their_inputs_are_put_in_order():
    network = Network()
    x = network.input("x", trt.float32, (4,))
    later = network.network.add_elementwise(x, x, trt.ElementWiseOperation.SUM)
    earlier = network.network.add_unary(x, trt.UnaryOperation.NEG)
    later.set_input(1, earlier.get_output(0))
    assert not network.run(later, x=np.ones(4, np.float32)).any()


def unknown_kind(network, x):
    return network.add_topk(x, trt.TopKOperation.MAX, 1, 1)


def unknown_operation(network, x):
    return network.add_unary(x, trt.UnaryOperation.ASINH)


def unknown_activation(network, x):
    return network.add_activation(x, trt.ActivationType.SELU)


def unknown_slice_mode(network, x):
    layer = network.add_slice(x, (0, 0), (2, 2), (1, 1))
    layer.mode = trt.SampleMode.WRAP
    return layer


@pytest.mark.parametrize(
    ("build", "word"),
    [(unknown_kind, "TOPK"), (unknown_operation, "ASINH"), (unknown_activation, "SELU"), (unknown_slice_mode, "WRAP")],
)
def test_what_it_does_not_know_is_refused_by_name(build, word):
    network = Network()
    layer = build(network.network, network.input("x", trt.float32, (2, 4)))
    layer.name = "the_layer"
    with pytest.raises(Unsupported, match=rf"the_layer.*{word}.*expected"):
        network.run(layer, x=np.ones((2, 4), np.float32))


def test_a_slice_out_of_bounds_is_an_error_and_no_shorter_result():
    network = Network()
    x = network.input("x", trt.float32, (-1, 4))
    layer = network.network.add_slice(x, (1, 0), (2, 4), (1, 1))
    with pytest.raises(IndexError, match=r"rows 1 … 2 of axis 0, which has 2"):
        network.run(layer, x=np.ones((2, 4), np.float32))


# --- as a stepper -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_cache_is_updated_in_place_and_only_where_the_step_writes(tiny_bundle, dtype):
    bundle = tiny_bundle("stack", dtype)
    stepper = InterpreterStepper.from_bundle(bundle)
    cache = stepper.new_cache(4, 16)
    for array in cache.arrays:
        array[:] = 7
    addresses = [array.ctypes.data for array in cache.arrays]
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(numpy_dtype(dtype))
    stepper.run(step_feeds("hidden_states", x, np.array([2, 5]), np.array([3, 3])), cache, first_row=1)
    assert [array.ctypes.data for array in cache.arrays] == addresses
    for array in cache.arrays:
        written = (array.astype(np.float32) != 7).any(axis=(1, 3))
        assert written.nonzero()[0].tolist() == [1] * 3 + [2] * 3 and written.nonzero()[1].tolist() == [
            2,
            3,
            4,
            5,
            6,
            7,
        ]


def test_another_capacity_parses_again_and_gives_the_same(tiny_bundle):
    bundle = tiny_bundle("block", "fp16")
    stepper = InterpreterStepper.from_bundle(bundle)
    x = np.random.default_rng(0).standard_normal((1, 5, 64)).astype(np.float16)
    feeds = step_feeds("hidden_states", x, np.zeros(1, np.int64), np.array([5]))
    outputs = [stepper.run(feeds, stepper.new_cache(1, capacity))["hidden_states_out"] for capacity in (16, 64, 16)]
    assert all((output == outputs[0]).all() for output in outputs)


def test_a_graph_whose_outputs_are_not_the_contracts_is_refused_by_name(tiny_bundle, tmp_path):
    def rename(model):
        node_of(model, "hidden_states_out").output[0] = "hidden"
        model.graph.output[0].name = "hidden"

    bundle = doctored(tiny_bundle("block", "fp16"), tmp_path / "renamed", rename)
    stepper = InterpreterStepper.from_bundle(bundle)
    x = np.zeros((1, 1, 64), np.float16)
    with pytest.raises(CheckFailed, match=r"hidden.*hidden_states_out"):
        stepper.run(step_feeds("hidden_states", x, np.zeros(1, np.int64), np.array([1])), stepper.new_cache(1, 16))
