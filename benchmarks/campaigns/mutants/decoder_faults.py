"""Faults that exporters of decoders have made: in the mask, the rotation, the heads, the cache and the residuals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from onnx import NodeProto, helper

from benchmarks.campaigns.mutants.drafts import Draft, Mutation
from tests.support import planted_faults as planted

VISIBLE = "attention_mask.visible/And"


def decoder_faults(draft: Draft) -> Iterator[Mutation]:
    """Yields the faults that fit the graph: those of its steps, of each layer, and of each pair of layers."""
    made = {name for node in draft.nodes for name in node.output}
    if VISIBLE in made:
        yield from _mask_faults()
        yield from _position_faults(draft)
    if "last_token/Sub" in made:
        for step in (1, -1):
            yield Mutation("last token off by one", f"{step:+d}", partial(_add_to_result, name="last_token", step=step))
    layers = sorted({int(name.split(".")[1]) for name in made if name.startswith("blocks.")})
    for layer in layers:
        if f"blocks.{layer}.attention.heads" in made and f"present.{layer}.key" in made:
            yield from _attention_faults(draft, layer)
        if f"blocks.{layer}.mlp.residual" in made:
            yield from _residual_faults(draft, layer)
        if f"blocks.{layer}.attention_norm" in made and layers[0] == layer:
            yield from _norm_faults(layer)
    for layer in layers[:-1]:
        yield from _exchanged_layers(draft, layer, layer + 1)


def _attribute(node: NodeProto, name: str, value: object) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _by_layer(draft: Draft, fault: planted.Fault, layer: int) -> None:
    fault(draft.model, layer)


# --- steps ------------------------------------------------------------------------------------------------------------


def _mask_faults() -> Iterator[Mutation]:
    reads = ("attention_mask.visible/LessOrEqual", "attention_mask.visible/Or")
    for name, source in (("a pad seen", reads[0]), ("the future seen", reads[1])):
        yield Mutation(name, VISIBLE, partial(_read_instead, name=VISIBLE, source=source))
    for step in (1, -1):
        change = partial(_add_to_input, node="attention_mask.visible/LessOrEqual", number=1, step=step)
        yield Mutation("the mask off by one", f"{step:+d}", change)
    for name in ("attention_mask.visible/Or", VISIBLE):
        yield Mutation("the mask inverted", name, partial(_inverted, name=name))


def _position_faults(draft: Draft) -> Iterator[Mutation]:
    for table in ("rope.cos", "rope.sin"):
        for step in (1, -1):
            change = partial(_add_to_input, node=table, number=1, step=step)
            yield Mutation("RoPE off by one", f"{table} {step:+d}", change)
    yield Mutation("RoPE off by one", "both", _shift_both_tables)
    yield Mutation("cos and sin exchanged", "every layer", partial(_exchange, first="rope.cos", second="rope.sin"))
    if any(value.name == "write_indices" for value in draft.model.graph.input):
        change = partial(_read_instead, name="position_ids", source="attention_mask.real/Add")
        yield Mutation("positions from the cache rows", "rope.cos and rope.sin", change)


def _shift_both_tables(draft: Draft) -> None:
    for table in ("rope.cos", "rope.sin"):
        _add_to_input(draft, table, 1, 1)


def _read_instead(draft: Draft, name: str, source: str) -> None:
    """Lets every reader of a value read another one; for positions, only the tables."""
    for node in draft.model.graph.node:
        for place, read in enumerate(node.input):
            if read == name and (name != "position_ids" or node.op_type == "Gather"):
                node.input[place] = source


def _exchange(draft: Draft, first: str, second: str) -> None:
    other = {first: second, second: first}
    for node in draft.model.graph.node:
        for place, read in enumerate(node.input):
            node.input[place] = other.get(read, read)


def _inverted(draft: Draft, name: str) -> None:
    readers = [node for node in draft.nodes if name in node.input]
    result = draft.insert_before(readers[0], "Not", [name], f"{name}/planted")
    for node in readers:
        node.input[list(node.input).index(name)] = result


def _add_to_input(draft: Draft, node: str, number: int, step: int) -> None:
    """Adds a number to one int64 input of a node. Positions stay at least 0."""
    reader = draft.node_of(node)
    output = f"{node}/planted.{number}"
    step_name = draft.constant(np.array(step, np.int64))
    draft.insert_before(reader, "Add", [reader.input[number], step_name], output)
    if reader.op_type == "Gather" and step < 0:
        zero = draft.constant(np.array(0, np.int64))
        output = draft.insert_before(reader, "Clip", [output, zero], f"{output}.clipped")
    reader.input[number] = output


def _add_to_result(draft: Draft, name: str, step: int) -> None:
    """Moves the row that the head reads; it stays inside of the step."""
    node = draft.node_of(f"{name}/Unsqueeze")
    moved = draft.insert_before(node, "Add", [node.input[0], draft.constant(np.array(step, np.int64))], f"{name}/moved")
    zero = draft.constant(np.array(0, np.int64))
    moved = draft.insert_before(node, "Clip", [moved, zero], f"{name}/clipped")
    length = draft.insert_before(node, "Shape", ["input_ids"], f"{name}/length", start=1, end=2)
    last = draft.insert_before(node, "Sub", [length, draft.constant(np.array([1], np.int64))], f"{name}/last")
    node.input[0] = draft.insert_before(node, "Min", [moved, last], f"{name}/planted")


# --- layers -----------------------------------------------------------------------------------------------------------


def _attention_faults(draft: Draft, layer: int) -> Iterator[Mutation]:
    config, growing = draft.manifest.config, draft.manifest.unit.cache == "growing"
    block, heads = f"blocks.{layer}", f"blocks.{layer}.attention.heads"
    right = config.head_dim**-0.5
    scales = {"twice": right**2, "missing": 1.0, "times 1.01": 1.01 * right, "of the hidden size": 64**-0.5}
    for what, scale in scales.items():
        yield Mutation("the scale of attention", f"{heads}: {what}", partial(_set_scale, name=heads, scale=scale))
    yield Mutation(
        "a causal mask from the upper left", heads, partial(_by_layer, fault=planted.upper_left_mask, layer=layer)
    )
    if config.n_heads == 2 * config.n_kv_heads == 4:
        yield Mutation("heads tiled", heads, partial(_by_layer, fault=planted.tiled_kv_heads, layer=layer))
    for name in ("q", "k"):
        node = f"{block}.attention.rope_{name}"
        yield Mutation("RoPE pairs halves", node, partial(_set_pairs, name=node))
        yield Mutation("RoPE turned back", node, partial(_negated_sin, name=node))
    if not growing:
        for kind in ("key", "value"):
            node = f"present.{layer}.{kind}"
            yield Mutation("write row + 1", node, partial(_add_to_input, node=node, number=2, step=1))
            yield Mutation("write row 0", node, partial(_zeroed_input, node=node, number=2))
    names = [f"{block}.attention.{name}_proj" for name in "qkv"]
    for first, second in ((0, 1), (1, 2)):
        if first or config.n_heads == config.n_kv_heads:
            change = partial(_exchange_results, first=names[first], second=names[second])
            yield Mutation("q, k and v exchanged", f"{block}: {'qkv'[first]} and {'qkv'[second]}", change)


def _set_scale(draft: Draft, name: str, scale: float) -> None:
    node = draft.node_of(name)
    if node.op_type == "Cast":  # attention in float32
        node = draft.node_of(node.input[0])
    _attribute(node, "scale", scale)


def _rotation(draft: Draft, name: str) -> NodeProto:
    """Returns the rotation that makes a value; in a narrow dtype a cast follows it."""
    node = draft.node_of(name)
    return node if node.op_type == "RotaryEmbedding" else draft.node_of(node.input[0])


def _set_pairs(draft: Draft, name: str) -> None:
    _attribute(_rotation(draft, name), "interleaved", 0)


def _negated_sin(draft: Draft, name: str) -> None:
    node = _rotation(draft, name)
    zero = draft.constant(np.array(0, np.float32))
    node.input[2] = draft.insert_before(node, "Sub", [zero, node.input[2]], f"{name}/planted")


def _zeroed_input(draft: Draft, node: str, number: int) -> None:
    reader = draft.node_of(node)
    zero = draft.constant(np.array(0, np.int64))
    reader.input[number] = draft.insert_before(reader, "Mul", [reader.input[number], zero], f"{node}/planted")


def _exchange_results(draft: Draft, first: str, second: str) -> None:
    outputs = draft.node_of(first).output
    one, two = list(outputs).index(first), list(outputs).index(second)
    outputs[one], outputs[two] = second, first


def _residual_faults(draft: Draft, layer: int) -> Iterator[Mutation]:
    block = f"blocks.{layer}"
    hidden = next(name for name in draft.node_of(f"{block}.attention.residual").input if "o_proj" not in name)
    places = {
        f"{block}.attention.residual": (f"{block}.attention_norm", f"{block}.attention.o_proj"),
        f"{block}.mlp.residual": (hidden, f"{block}.ffn_norm", f"{block}.attention.o_proj"),
    }
    for name, sources in places.items():
        for source in sources:
            change = partial(_set_residual, name=name, source=source)
            yield Mutation("a residual from the wrong place", f"{name}: {source}", change)
    yield Mutation("gate and up exchanged", block, partial(_by_layer, fault=planted.swapped_gate_and_up, layer=layer))
    late = {
        f"{block}.attention.qkv_proj": hidden,
        f"{block}.mlp.gate_up_proj": f"{block}.attention.residual",
    }
    for name, source in late.items():
        yield Mutation("a norm left out", name, partial(_set_first, name=name, source=source))
    swapped = partial(_exchange, first=f"{block}.attention_norm.weight", second=f"{block}.ffn_norm.weight")
    yield Mutation("weights of the two norms exchanged", block, swapped)


def _set_residual(draft: Draft, name: str, source: str) -> None:
    node = draft.node_of(name)
    kept = next(place for place, read in enumerate(node.input) if read.endswith("_proj"))
    node.input[1 - kept] = source


def _set_first(draft: Draft, name: str, source: str) -> None:
    draft.node_of(name).input[0] = source


def _norm_faults(layer: int) -> Iterator[Mutation]:
    for inside in (True, False):
        for early in (True, False):
            where = f"eps {'inside' if inside else 'outside'}, weight {'before' if early else 'after'} the cast"
            fault = planted.spelled_out_norm(inside, early)
            yield Mutation("a norm spelled out", where, partial(_by_layer, fault=fault, layer=layer))


def _exchanged_layers(draft: Draft, first: int, second: int) -> Iterator[Mutation]:
    prefix = f"blocks.{first}."
    for name in draft.stored:
        other = name.replace(prefix, f"blocks.{second}.")
        if name.startswith(prefix) and other in draft.stored and not name.endswith((".scales", ".zero_points")):
            if name.endswith(".integers"):
                name, other = name.removesuffix(".integers"), other.removesuffix(".integers")
            change = partial(_exchange_layers, first=name, second=other)
            yield Mutation("two layers' weights exchanged", name, change)


def _exchange_layers(draft: Draft, first: str, second: str) -> None:
    """Exchanges two weights in the data file, and all tensors that they consist of."""
    for name in draft.stored:
        if name == first or name.startswith(f"{first}."):
            one, two = draft.raw(name), draft.raw(name.replace(first, second))
            one[:], two[:] = two.copy(), one.copy()
