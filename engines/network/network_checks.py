"""Holds a parsed network against the contract, before anything is built: what TensorRT understood must be what was meant."""

from __future__ import annotations

from engines.network.parsed import ParsedNetwork
from exporter.bundle.manifest import Manifest
from exporter.common.errors import BackendError, CheckFailed

# Every layer type that a graph of this project parses to. Another one is no error, only new: it is noted.
KNOWN_LAYERS = {
    "ACTIVATION", "ATTENTION_INPUT", "ATTENTION_OUTPUT", "CAST", "CONCATENATION", "CONSTANT", "DEQUANTIZE", "ELEMENTWISE", "FILL", "GATHER",
    "KV_CACHE_UPDATE", "MATRIX_MULTIPLY", "NORMALIZATION", "REDUCE", "ROTARY_EMBEDDING", "SELECT", "SHAPE", "SHUFFLE", "SLICE", "SQUEEZE",
    "UNARY", "UNSQUEEZE",
}  # fmt: skip
SMALLEST_RTX_HEAD_DIM = 16


def check_weight_format(manifest: Manifest) -> None:
    """Refuses weights in integers that TensorRT's parser does not read.

    Raises:
        BackendError: they have zero points.
    """
    if manifest.weight_format is not None and not manifest.weight_format.symmetric:
        got = manifest.weight_format.dtype
        raise BackendError(
            f"tensorrt: this bundle's weights are {got} with zero points, which its parser refuses; export with --weights {got[1:]}"
        )


def check_network(parsed: ParsedNetwork, manifest: Manifest | None = None) -> list[str]:
    """Checks a network that is about to be built; returns notes about what is unusual but allowed.

    Args:
        parsed: the network.
        manifest: of the bundle it came from; without one, only what holds for every network is checked.

    Raises:
        CheckFailed: the network would not compute what the graph means; every difference is listed.
        BackendError: the backend has no kernel for it.
    """
    problems = [*_attention_problems(parsed), *_cache_problems(parsed)]
    if manifest is not None:
        problems += _contract_problems(parsed, manifest)
    if problems:
        raise CheckFailed(
            f"network: {parsed.backend} understood something else than was meant:\n  " + "\n  ".join(problems)
        )
    _check_kernels(parsed)
    unknown = sorted(set(parsed.layer_types) - KNOWN_LAYERS)
    return [f"layer types outside the known list: {', '.join(unknown)}"] if unknown else []


def _attention_problems(parsed: ParsedNetwork) -> list[str]:
    problems = []
    for layer in parsed.attention:
        if not layer.mask:
            problems.append(f"{layer.name}: it carries no mask, expected an explicit one")
        if layer.causal_kind != "NONE":
            problems.append(f"{layer.name}: its causal kind is {layer.causal_kind}, expected NONE and an explicit mask")
        if layer.key_value_lengths:
            problems.append(f"{layer.name}: it takes key/value lengths, expected an explicit mask alone")
    return problems


def _cache_problems(parsed: ParsedNetwork) -> list[str]:
    problems = []
    shapes = {tensor.name: tensor.shape for tensor in parsed.inputs}
    for update in parsed.cache_updates:
        if not update.past_is_input:
            problems.append(
                f"{update.name}: it updates {update.past}, expected an input of the network; a cache must be the caller's buffer"
            )
        elif -1 in shapes[update.past][1:]:
            problems.append(
                f"{update.past}: its shape is {list(shapes[update.past])}, expected every axis but the batch fixed; fix the capacity"
            )
        if not update.present_is_output:
            problems.append(
                f"{update.name}: it puts out {update.present}, expected an output of the network at the cache's address"
            )
    return problems


def _contract_problems(parsed: ParsedNetwork, manifest: Manifest) -> list[str]:
    contract, config = manifest.contract, manifest.config
    problems = []
    for kind, specs, tensors in (
        ("input", contract.inputs, parsed.inputs),
        ("output", contract.outputs, parsed.outputs),
    ):
        expected = [(spec.name, spec.dtype) for spec in specs]
        got = [(tensor.name, tensor.dtype) for tensor in tensors]
        if got != expected:
            problems.append(f"{kind}s: got {got}, expected {expected}")
    pairs = {(update.past, update.present) for update in parsed.cache_updates}
    if pairs != set(contract.cache_pairs):
        problems.append(f"cache updates: got {sorted(pairs)}, expected one for each of {sorted(contract.cache_pairs)}")
    n_attention = manifest.unit.n_layers if manifest.unit.has_cache else int(manifest.unit.component == "attention")
    if len(parsed.attention) != n_attention:
        problems.append(f"attention layers: got {len(parsed.attention)}, expected {n_attention}")
    for layer in parsed.attention:
        heads = (layer.queries[1], layer.keys[1], layer.queries[3])
        if heads != (config.n_heads, config.n_kv_heads, config.head_dim):
            problems.append(
                f"{layer.name}: got {heads[0]} query heads on {heads[1]} KV heads of {heads[2]}, "
                f"expected {config.n_heads} on {config.n_kv_heads} of {config.head_dim} as in the manifest"
            )
    return problems


def _check_kernels(parsed: ParsedNetwork) -> None:
    """TensorRT-RTX has fused attention for half precision only; it fails late and at length where there is none."""
    if not parsed.backend.is_rtx or not parsed.attention:
        return
    floats = {tensor.dtype for tensor in parsed.inputs} & {"fp16", "bf16", "fp32"}
    if floats == {"fp32"} and any(layer.dtype == "fp32" for layer in parsed.attention):
        raise BackendError(
            f"{parsed.backend}: it has no kernel for float32 attention, this graph is float32; export it with --dtype fp16 or bf16, "
            "or build with --backend tensorrt"
        )
    small = [layer for layer in parsed.attention if layer.queries[3] < SMALLEST_RTX_HEAD_DIM]
    if small:
        raise BackendError(
            f"{parsed.backend}: {small[0].name} has head_dim {small[0].queries[3]}, expected at least {SMALLEST_RTX_HEAD_DIM}; "
            "it has no attention kernel below that"
        )
