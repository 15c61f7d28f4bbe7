"""Mutations of a bundle's graph."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from benchmarks.campaigns.hostile_input.values import FOREIGN_PATHS, SECRET, flip_bytes

HUGE = (0, -1, 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 1_000_000)
OPERATORS = (
    "", "Loop", "If", "Scan", "ConstantOfShape", "Tile", "Expand", "Range", "Concat", "MatMul", "Attention",
    "TensorScatter", "Slice", "Gather", "Reshape", "Transpose", "Cast", "StringConcat", "Resize", "NonZero",
    "RandomNormal", "OneHot", "Pad", "SequenceEmpty", "Nope", "x" * 5000,
)  # fmt: skip
DOMAINS = ("ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "evil", "\0", "x" * 1000)


def mutate_graph(path: Path, rng: Random) -> None:
    """Changes a graph file as a protobuf, as bytes, or both."""
    data = path.read_bytes()
    if rng.random() < 0.75:
        model = onnx.load_from_string(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(GRAPH_MUTATIONS)(model, rng)
        data = model.SerializeToString()
    if rng.random() < 0.3:
        data = flip_bytes(data, rng) if rng.random() < 0.8 else data[: rng.randrange(len(data) + 1)]
    path.write_bytes(data)


def _node(model: ModelProto, rng: Random) -> NodeProto:
    return rng.choice(model.graph.node) if model.graph.node else model.graph.node.add(op_type="Identity")


def _values(model: ModelProto) -> list[str]:
    graph = model.graph
    return [v.name for v in graph.input] + [t.name for t in graph.initializer] + [
        name for node in graph.node for name in node.output
    ] or [""]


def delete_node(model: ModelProto, rng: Random) -> None:
    if model.graph.node:
        del model.graph.node[rng.randrange(len(model.graph.node))]


def repeat_node(model: ModelProto, rng: Random) -> None:
    model.graph.node.append(_node(model, rng))


def shuffle_nodes(model: ModelProto, rng: Random) -> None:
    nodes = list(model.graph.node)
    rng.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def rewire(model: ModelProto, rng: Random) -> None:
    """Makes a random value of the graph an input of a random node; this gives wrong types and cycles."""
    node = _node(model, rng)
    if node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(
            [*_values(model), "", "nowhere", node.output[0] if node.output else ""]
        )


def rename_output(model: ModelProto, rng: Random) -> None:
    node = _node(model, rng)
    if node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice([*_values(model), "", "fresh"])


def drop_ends(model: ModelProto, rng: Random) -> None:
    node = _node(model, rng)
    del rng.choice((node.input, node.output))[rng.randrange(3) :]


def many_ends(model: ModelProto, rng: Random) -> None:
    node = _node(model, rng)
    rng.choice((node.input, node.output)).extend(rng.choice(_values(model)) for _ in range(rng.choice((1, 8, 3000))))


def other_operator(model: ModelProto, rng: Random) -> None:
    _node(model, rng).op_type = rng.choice(OPERATORS)


def other_domain(model: ModelProto, rng: Random) -> None:
    node = _node(model, rng)
    node.domain = rng.choice(DOMAINS)
    if rng.random() < 0.7:
        model.opset_import.add(domain=node.domain, version=1)


def foreign_name(model: ModelProto, rng: Random) -> None:
    _node(model, rng).name = rng.choice(("\x1b[2J\x1b]0;owned\x07", "[red]x[/red]", "a\nb", "x" * 100_000))


def attribute(model: ModelProto, rng: Random) -> None:
    """Gives a node an attribute of another value, type or name, or one too many."""
    node = _node(model, rng)
    values = (
        *HUGE,
        0.5,
        float("nan"),
        "text",
        SECRET,
        [1] * 9,
        [-1, 2**62],
        [0.5],
        numpy_helper.from_array(np.ones(3, np.float32), "t"),
        [],
    )
    name = rng.choice(
        [a.name for a in node.attribute]
        + ["axis", "perm", "to", "scale", "q_num_heads", "softcap", "body", "value", "allowzero"]
    )
    for index in reversed([i for i, a in enumerate(node.attribute) if a.name == name and rng.random() < 0.9]):
        del node.attribute[index]
    value = rng.choice(values)
    node.attribute.append(helper.make_attribute(name, value, attr_type=AttributeProto.INTS if value == [] else None))
    if rng.random() < 0.1:
        node.attribute[-1].type = rng.randrange(15)


def subgraph(model: ModelProto, rng: Random) -> None:
    """Adds a graph in an attribute, at times nested, with data from outside."""
    inner = GraphProto(name="inner")
    tensor = inner.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    point_outside(tensor, rng.choice(FOREIGN_PATHS), 0, 16)
    inner.node.add(op_type="Identity", input=["w"], output=["y"])
    inner.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4]))
    for depth in range(rng.choice((0, 0, 3, 30))):
        outer = GraphProto(name=f"depth{depth}")
        outer.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=GraphProto()))
        outer.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4]))
        inner = outer
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    model.graph.node.insert(0, helper.make_node("If", ["c"], ["branched"], then_branch=inner, else_branch=inner))


def function(model: ModelProto, rng: Random) -> None:
    """Adds a model-local function; it may call itself and may have the name of a standard operator."""
    name, domain = rng.choice(("MatMul", "Add", "Own")), rng.choice(("", "own"))
    body = [helper.make_node(rng.choice((name, "Add")), ["a", "a"], ["b"], domain=domain)]
    model.functions.append(helper.make_function(domain, name, ["a"], ["b"], body, list(model.opset_import)))
    model.graph.node.insert(
        0, helper.make_node(name, [model.graph.input[0].name if model.graph.input else ""], ["called"], domain=domain)
    )
    if domain:
        model.opset_import.add(domain=domain, version=1)


def versions(model: ModelProto, rng: Random) -> None:
    if rng.random() < 0.5:
        model.ir_version = rng.choice((0, 1, 3, 13, 99, 2**62))
    elif model.opset_import:
        model.opset_import[0].version = rng.choice((-1, 0, 1, 7, 18, 23, 25, 2**40))
    if rng.random() < 0.1:
        del model.opset_import[:]


def interface(model: ModelProto, rng: Random) -> None:
    """Removes, doubles or renames an input or output, or changes its type, rank or size."""
    values = rng.choice((model.graph.input, model.graph.output, model.graph.value_info))
    if not values:
        return
    index = rng.randrange(len(values))
    value, how = values[index], rng.randrange(7)
    if how == 0:
        del values[index]
    elif how == 1:
        values.append(value)
    elif how == 2:
        value.name = rng.choice([*_values(model), "", "other", "\ufeff"])
    elif how == 3:
        value.type.tensor_type.elem_type = rng.choice((0, 1, 6, 7, 8, 9, 10, 11, 16, 99))
    elif how == 4:
        value.type.tensor_type.shape.dim.add(dim_value=rng.choice(HUGE))
    elif how == 5:
        value.type.sequence_type.elem_type.tensor_type.elem_type = 1
    elif value.type.tensor_type.shape.dim:
        dim = rng.choice(value.type.tensor_type.shape.dim)
        dim.dim_value = rng.choice(HUGE)


def initializer(model: ModelProto, rng: Random) -> None:
    """Gives a tensor dims, type or content that do not match, or another tensor's name."""
    if not model.graph.initializer:
        return
    tensor, how = rng.choice(model.graph.initializer), rng.randrange(7)
    if how == 0:
        tensor.dims.append(rng.choice(HUGE))
    elif how == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(HUGE)
    elif how == 2:
        tensor.data_type = rng.choice((0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 16, 17, 21, 23, 99))
    elif how == 3:
        tensor.name = rng.choice(_values(model))
    elif how == 4:
        tensor.raw_data = rng.choice((b"", bytes(3), bytes(8), b"\xff" * 8, bytes(100_000)))
    elif how == 5:
        tensor.int64_data.extend(rng.choice(HUGE) for _ in range(rng.choice((1, 4, 1000))))
    else:
        tensor.CopyFrom(
            numpy_helper.from_array(
                np.array([rng.choice(HUGE)] * min(1000, max(1, sum(tensor.dims[:1]))), np.int64), tensor.name
            )
        )


def other_constant(model: ModelProto, rng: Random) -> None:
    """Changes a number in a constant that a shape, range or slice uses."""
    constants = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64 and len(t.raw_data) >= 8]
    if constants:
        tensor = rng.choice(constants)
        at = 8 * rng.randrange(len(tensor.raw_data) // 8)
        number = struct.pack("<q", rng.choice((*HUGE, 1000, 100_000_000)))
        tensor.raw_data = tensor.raw_data[:at] + number + tensor.raw_data[at + 8 :]


def sparse(model: ModelProto, rng: Random) -> None:
    values = numpy_helper.from_array(np.ones(2, np.float32), rng.choice([*_values(model), "sparse"]))
    indices = numpy_helper.from_array(np.array([rng.choice(HUGE), 1], np.int64), "i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [rng.choice((10, 2**40))]))


def bomb(model: ModelProto, rng: Random) -> None:
    """Adds nodes that need huge memory: a fill, an expansion, a range, a chain of doublings or of outer products."""
    graph, kind = model.graph, rng.randrange(5)
    many = rng.choice((2**28, 2**33, 2**40))
    graph.initializer.append(numpy_helper.from_array(np.array([many], np.int64), "bomb.shape"))
    graph.initializer.append(numpy_helper.from_array(np.array(many, np.int64), "bomb.size"))
    graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "bomb.zero"))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "bomb.one"))
    if kind == 0:
        made = [helper.make_node("ConstantOfShape", ["bomb.shape"], ["bomb.0"])]
    elif kind == 1:
        made = [helper.make_node("Expand", ["bomb.zero", "bomb.shape"], ["bomb.0"])]
    elif kind == 2:
        made = [helper.make_node("Range", ["bomb.one", "bomb.size", "bomb.one"], ["bomb.0"])]
    elif kind == 3:
        names = ["bomb.zero", *(f"bomb.{i}" for i in range(31))]
        made = [helper.make_node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]
    else:
        made, last = [], "position_ids"
        for i in range(6):
            made.append(helper.make_node("Unsqueeze", [last, "bomb.zero"], [f"bomb.u{i}"]))
            made.append(
                helper.make_node("Unsqueeze", ["position_ids", "bomb.shape" if i == 3 else "bomb.zero"], [f"bomb.v{i}"])
            )
            made.append(helper.make_node("MatMul", [f"bomb.u{i}", f"bomb.v{i}"], [f"bomb.{i}"]))
            last = f"bomb.{i}"
    for index, node in enumerate(made):
        graph.node.insert(index, node)
    if rng.random() < 0.5 and graph.output:  # an output needs it
        graph.output.append(helper.make_tensor_value_info(made[-1].output[0], TensorProto.INT64, None))


def extras(model: ModelProto, rng: Random) -> None:
    """Adds parts of the format that no export uses."""
    how = rng.randrange(4)
    if how == 0:
        training = model.training_info.add()
        training.algorithm.CopyFrom(model.graph)
    elif how == 1:
        model.metadata_props.add(key="k" * 10, value="v" * 100_000)
    elif how == 2:
        model.graph.quantization_annotation.add(tensor_name="x")
    else:
        model.graph.doc_string = "\x1b[31m" * 1000


def point_outside(tensor: TensorProto, location: str, offset: object, length: object) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("external_data")
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


def constant_from_outside(model: ModelProto, rng: Random) -> None:
    tensor = TensorProto(name="stolen", data_type=TensorProto.UINT8, dims=[len(SECRET)])
    point_outside(tensor, rng.choice(FOREIGN_PATHS), 0, len(SECRET))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["stolen"], value=tensor))
    if rng.random() < 0.5:
        model.graph.output.append(helper.make_tensor_value_info("stolen", TensorProto.UINT8, [len(SECRET)]))


GRAPH_MUTATIONS: tuple[Callable[[ModelProto, Random], None], ...] = (
    delete_node, repeat_node, shuffle_nodes, rewire, rewire, rename_output, drop_ends, many_ends, other_operator,
    other_domain, foreign_name, attribute, attribute, subgraph, function, versions, interface, interface, initializer,
    initializer, other_constant, other_constant, sparse, bomb, extras, constant_from_outside,
)  # fmt: skip
