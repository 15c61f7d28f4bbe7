"""Checks a parsed network against our contract, before anything is built: TensorRT must compute what the graph says.

Nothing here checks the form of an untrusted file. `exporter.bundle.graph_form` checks the form of a bundle's graph, and
`engines.network.source` the form of any other ONNX file. Both run before TensorRT parses the graph.
"""

from __future__ import annotations

from engines.network.parsed import ParsedNetwork
from exporter.bundle.manifest import Manifest
from exporter.common.errors import BackendError, CheckFailed

# Every layer type that TensorRT makes from a graph of this project. Another type is allowed, and gives a note.
KNOWN_LAYERS = {
    *("ACTIVATION", "ATTENTION_INPUT", "ATTENTION_OUTPUT", "CAST", "CONCATENATION", "CONSTANT", "DEQUANTIZE"),
    *("ELEMENTWISE", "FILL", "GATHER", "KV_CACHE_UPDATE", "MATRIX_MULTIPLY", "NORMALIZATION", "REDUCE"),
    *("ROTARY_EMBEDDING", "SELECT", "SHAPE", "SHUFFLE", "SLICE", "SQUEEZE", "UNARY", "UNSQUEEZE"),
}
SMALLEST_RTX_HEAD_DIM = 16


def check_weight_format(manifest: Manifest) -> None:
    """Checks that TensorRT's parser reads the format of a bundle's weights.

    Raises:
        BackendError: the weights have zero points.
    """
    if manifest.weight_format is not None and not manifest.weight_format.symmetric:
        got = manifest.weight_format.dtype
        problem = f"this bundle's weights are {got} with zero points, which its parser refuses"
        raise BackendError(f"tensorrt: {problem}; export again with {got[1:]} weights")


def check_network(parsed: ParsedNetwork, manifest: Manifest | None = None) -> list[str]:
    """Checks a network before its build.

    Args:
        parsed: the network.
        manifest: manifest of the network's bundle. Without one, the checks that need a manifest are left out.

    Returns:
        Notes about what is unusual but allowed.

    Raises:
        CheckFailed: the network would compute something else than the graph says; the message has every difference.
        BackendError: the backend has no kernel for the network.
    """
    problems = [*_attention_problems(parsed), *_cache_problems(parsed)]
    if manifest is not None:
        problems += _contract_problems(parsed, manifest)
    if problems:
        raise CheckFailed(f"network: {parsed.backend} parsed it to something else:\n  " + "\n  ".join(problems))
    _check_kernels(parsed)
    unknown = sorted(set(parsed.layer_types) - KNOWN_LAYERS)
    return [f"layer types outside the known list: {', '.join(unknown)}"] if unknown else []


def _attention_problems(parsed: ParsedNetwork) -> list[str]:
    problems = []
    for layer in parsed.attention:
        if not layer.mask:
            problems.append(f"{layer.name}: got no mask, expected an explicit one")
        if layer.causal_kind != "NONE":
            problems.append(f"{layer.name}: got causal kind {layer.causal_kind}, expected NONE and an explicit mask")
        if layer.key_value_lengths:
            problems.append(f"{layer.name}: got key/value lengths, expected only an explicit mask")
    return problems


def _cache_problems(parsed: ParsedNetwork) -> list[str]:
    """What is wrong with the cache updates: a cache must be a buffer of the caller with a fixed capacity."""
    problems = []
    shapes = {tensor.name: tensor.shape for tensor in parsed.inputs}
    for update in parsed.cache_updates:
        if not update.past_is_input:
            problems.append(f"{update.name}: it updates {update.past}, expected an input of the network")
        elif -1 in shapes[update.past][1:]:
            shape, expected = list(shapes[update.past]), "a fixed size on every axis but the batch"
            problems.append(f"{update.past}: got shape {shape}, expected {expected}; fix the capacity")
        if not update.present_is_output:
            expected = "an output of the network at the cache's address"
            problems.append(f"{update.name}: it makes {update.present}, expected {expected}")
    return problems


def _contract_problems(parsed: ParsedNetwork, manifest: Manifest) -> list[str]:
    """Differences between the network and the bundle's contract: inputs, outputs, cache pairs, attention layers."""
    contract, config = manifest.contract, manifest.config
    problems = []
    sides = (("inputs", contract.inputs, parsed.inputs), ("outputs", contract.outputs, parsed.outputs))
    for kind, specs, tensors in sides:
        wanted = [(spec.name, spec.dtype) for spec in specs]
        got = [(tensor.name, tensor.dtype) for tensor in tensors]
        if got != wanted:
            problems.append(f"{kind}: got {got}, expected {wanted}")
    pairs = {(update.past, update.present) for update in parsed.cache_updates}
    if pairs != set(contract.cache_pairs):
        problems.append(f"cache updates: got {sorted(pairs)}, expected one for each of {sorted(contract.cache_pairs)}")
    n_attention = manifest.unit.n_layers if manifest.unit.has_cache else int(manifest.unit.component == "attention")
    if len(parsed.attention) != n_attention:
        problems.append(f"attention layers: got {len(parsed.attention)}, expected {n_attention}")
    for layer in parsed.attention:
        n_heads, n_kv_heads, head_dim = layer.queries[1], layer.keys[1], layer.queries[3]
        if (n_heads, n_kv_heads, head_dim) != (config.n_heads, config.n_kv_heads, config.head_dim):
            heads = f"{n_heads} query heads on {n_kv_heads} KV heads of {head_dim}"
            needed = f"{config.n_heads} on {config.n_kv_heads} of {config.head_dim} as in the manifest"
            problems.append(f"{layer.name}: got {heads}, expected {needed}")
    return problems


def _check_kernels(parsed: ParsedNetwork) -> None:
    """Checks that TensorRT-RTX has a kernel for the attention. Without this check a build fails late."""
    if not parsed.backend.is_rtx or not parsed.attention:
        return
    floats = {tensor.dtype for tensor in parsed.inputs} & {"fp16", "bf16", "fp32"}
    if floats == {"fp32"} and any(layer.dtype == "fp32" for layer in parsed.attention):
        problem = "it has no kernel for float32 attention, this graph is float32"
        raise BackendError(f"{parsed.backend}: {problem}; export it in fp16 or bf16, or build with backend=tensorrt")
    small = [layer for layer in parsed.attention if layer.queries[3] < SMALLEST_RTX_HEAD_DIM]
    if small:
        got, expected = f"{small[0].name} has head_dim {small[0].queries[3]}", f"at least {SMALLEST_RTX_HEAD_DIM}"
        raise BackendError(
            f"{parsed.backend}: {got}, expected {expected}; it has no attention kernel for smaller heads"
        )
