"""Parses an ONNX model with TensorRT, and describes the network as plain data for checks and inspection."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from engines.library.backend import Backend
from engines.library.tensorrt_logger import create_logger
from exporter.common.errors import BackendError, CheckFailed
from exporter.common.timing import timed

log = logging.getLogger(__name__)
DTYPE_NAMES = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
    "INT8": "int8",
    "INT4": "int4",
}


@dataclass(frozen=True)
class NetworkTensor:
    """An input or output of a network. A dynamic axis has size -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as the parser made it.

    Attributes:
        name: name of the layer.
        queries, keys: shapes [B, H, T, D] and [B, K, L, D].
        dtype: dtype of the queries.
        mask: whether the layer has an explicit mask.
        causal_kind: "NONE", "UPPER_LEFT", …
        key_value_lengths: whether the layer takes lengths of keys and values.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: str
    mask: bool
    causal_kind: str
    key_value_lengths: bool


@dataclass(frozen=True)
class CacheUpdate:
    """One KV-cache update layer.

    Attributes:
        name: name of the layer.
        past, present: names of the tensor that it updates and of its output.
        past_is_input, present_is_output: whether they are an input and an output of the network.
    """

    name: str
    past: str
    present: str
    past_is_input: bool
    present_is_output: bool


@dataclass
class ParsedNetwork:
    """A network, with the TensorRT objects that must live as long as it.

    Attributes:
        backend: the backend that parsed it.
        builder, network, parser, logger: objects of TensorRT.
        inputs, outputs: tensors of the network.
        attention, cache_updates: its layers of these kinds.
        layer_types: number of layers of each type.
    """

    backend: Backend
    builder: Any
    network: Any
    parser: Any
    logger: Any
    inputs: tuple[NetworkTensor, ...] = ()
    outputs: tuple[NetworkTensor, ...] = ()
    attention: tuple[AttentionLayer, ...] = ()
    cache_updates: tuple[CacheUpdate, ...] = ()
    layer_types: Counter[str] = field(default_factory=Counter)


def parse_network(backend: Backend, model: onnx.ModelProto, path: Path) -> ParsedNetwork:
    """Parses an ONNX model. TensorRT reads the external data itself, from the folder of `path`.

    Raises:
        BackendError: TensorRT cannot create a builder.
        CheckFailed: TensorRT's parser refuses the graph; the message has the node and the parser's reason.
    """
    trt, logger = backend.trt, create_logger(backend.trt)
    builder = trt.Builder(logger)
    if builder is None:
        raise BackendError(f"{backend}: it cannot create a builder: {logger.reason()}")
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, logger)
    with timed(log, "%s parsed by %s", path, backend):
        good = parser.parse(model.SerializeToString(), str(path))
    for warning in logger.warnings:
        log.debug("%s: %s", backend, warning)
    if not good:
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        reasons = [f"{error.node_name() or error.node_operator()}: {error.desc()}" for error in errors]
        raise CheckFailed(f"{path}: {backend} does not parse it:\n  " + "\n  ".join(reasons or [logger.reason()]))
    parsed = ParsedNetwork(backend, builder, network, parser, logger)
    try:
        parsed.inputs = tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs))
        parsed.outputs = tuple(_tensor(network.get_output(i)) for i in range(network.num_outputs))
        _read_layers(parsed)
    except (RuntimeError, ValueError) as error:  # TensorRT finds contradicting shapes only when it is asked for a shape
        problem = f"{backend} parses it and cannot compute its shapes ({error})"
        raise CheckFailed(f"{path}: {problem}: {logger.reason()}") from None
    counts = (network.num_layers, len(parsed.attention), len(parsed.cache_updates))
    log.info("%d layers, %d attentions, %d cache updates", *counts)
    return parsed


def _strongly_typed(trt: Any) -> int:
    """Creation flags for a strongly typed network. TensorRT 10 needs a flag, later versions make no other network."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _read_layers(parsed: ParsedNetwork) -> None:
    trt = parsed.backend.trt
    attention, updates = [], []
    for i in range(parsed.network.num_layers):
        layer = parsed.network.get_layer(i)
        kind = layer.type.name
        parsed.layer_types[kind] += 1
        if kind == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer  # a layer has its properties once its class is set
            attention.append(_attention(layer))
        elif kind == "KV_CACHE_UPDATE":
            past, present = layer.get_input(0), layer.get_output(0)
            ends = (past.is_network_input, present.is_network_output)
            updates.append(CacheUpdate(layer.name, past.name, present.name, *ends))
    parsed.attention, parsed.cache_updates = tuple(attention), tuple(updates)


def _attention(layer: Any) -> AttentionLayer:
    attention = layer.attention
    queries, keys = layer.get_input(0), layer.get_input(1)
    return AttentionLayer(
        name=layer.name,
        queries=tuple(queries.shape),
        keys=tuple(keys.shape),
        dtype=dtype_name(queries.dtype),
        mask=attention.mask is not None,
        causal_kind=attention.causal_kind.name,
        key_value_lengths=attention.key_value_lengths is not None,
    )


def _tensor(tensor: Any) -> NetworkTensor:
    return NetworkTensor(tensor.name, dtype_name(tensor.dtype), tuple(tensor.shape))


def dtype_name(dtype: Any) -> str:
    """Returns our name of a TensorRT dtype."""
    return DTYPE_NAMES.get(dtype.name, dtype.name.lower())
