"""The bytes of weights that a unit's graphs will store, known before the export.

An export needs them to check the space on the disk and to choose the number of parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from exporter.common.errors import InputError
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import stored_bytes
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Bounds, Unit, part_bounds
from exporter.spec.weight_formats import is_quantized

COMPILE_COPIES = 3  # TensorRT holds so many copies of the weights while it compiles them


def parts_within(spec: GraphSpec, budget_bytes: int) -> int:
    """Returns the smallest number of parts that can each be compiled within a budget.

    Compiling a part takes about COMPILE_COPIES times the bytes of its weights.

    Args:
        spec: the graph that is cut into parts.
        budget_bytes: memory for one compilation.

    Raises:
        InputError: one layer alone needs more than the budget.
    """
    largest = 0
    for n_parts in range(1, spec.unit.n_layers + 1):
        parts = part_bounds(spec.unit.n_layers, n_parts)
        largest = max(COMPILE_COPIES * stored_weights_bytes(spec, bounds) for bounds in parts)
        if largest <= budget_bytes:
            return n_parts
    raise InputError(
        f"part budget: got {budget_bytes / 2**30:.2f} GiB, expected at least {largest / 2**30:.2f}, "
        "what compiling one layer takes"
    )


def stored_weights_bytes(spec: GraphSpec, bounds: Bounds | None = None) -> int:
    """Returns the bytes of all tensors in one graph's data file, without the padding between them.

    Args:
        spec: the graph. It has RoPE tables of 2N rows where `max_positions` is N.
        bounds: the layers of one part; None takes the unit as one graph.
    """
    config, unit, dtype, weight_format = spec.config, spec.unit, spec.dtype, spec.weight_format
    n_bytes = 0
    for name, shape in _matrices(config, unit, bounds or (0, unit.n_layers), weight_format is not None):
        if weight_format is not None and is_quantized(name):
            tensors = weight_format.of(name).tensors((shape[1], shape[0]), dtype)
            n_bytes += sum(stored_bytes(*tensor) for tensor in tensors.values())
        else:
            n_bytes += stored_bytes(dtype, shape)
    if unit.kind != "component":
        rotations = stored_bytes("fp32", (2 * spec.max_positions, config.head_dim // 2))
        n_bytes += 2 * rotations  # every graph with blocks has a table of cos and one of sin
    return n_bytes


def _matrices(
    config: ModelConfig, unit: Unit, bounds: Bounds, quantized: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of every weight in one graph.

    A tied head is the embedding itself, except where the head is quantized or the embedding is in another part.
    """
    if unit.kind == "component":
        yield from weight_shapes(config, unit).items()
        return
    stack = Unit("stack", first_layer=unit.first_layer + bounds[0], n_layers=bounds[1] - bounds[0])
    yield from weight_shapes(config, stack).items()
    if unit.kind != "model":
        return
    embeds, ends = bounds[0] == 0, bounds[1] == unit.n_layers
    if embeds:
        yield "embedding.weight", (config.vocab_size, config.hidden_size)
    if ends:
        yield "norm.weight", (config.hidden_size,)
        if quantized or not (config.tie_word_embeddings and embeds):
            yield "lm_head.weight", (config.vocab_size, config.hidden_size)
