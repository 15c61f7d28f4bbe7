"""Faults planted into an exported graph. Users have reported each kind, and the graph stays valid ONNX."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporter.bundle.bundle import Bundle, sha256_of
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE, graph_files
from exporter.graph.weight_reader import weight_places

Fault = Callable[[onnx.ModelProto, int], None]  # edits a model at one layer


def doctored(bundle: Bundle, folder: Path, fault: Callable[[onnx.ModelProto], None] | None = None) -> Bundle:
    """Returns a copy of a bundle with an edited graph and a manifest that matches the edited files.

    The copy is read, not opened: opening refuses operators that no export has, and later stages must find them.
    """
    shutil.copytree(bundle.folder, folder)
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    if fault is not None:
        fault(model)
    onnx.save(model, folder / GRAPH_FILE)
    return relisted(Bundle.read(folder))


def relisted(bundle: Bundle) -> Bundle:
    """Writes the sizes and checksums of a bundle's edited graphs and weights into its manifest, and reads it again."""
    folder = (bundle.whole or bundle).folder
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in graph_files(len(manifest["parts"])):
        manifest["files"][name] = {"size_bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return Bundle.read(folder)  # opening would refuse some faults before the check under test


def node_of(model: onnx.ModelProto, output: str) -> NodeProto:
    """The node that makes a value."""
    return next(node for node in model.graph.node if output in node.output)


def insert_before(model: onnx.ModelProto, node: NodeProto, *nodes: NodeProto) -> None:
    index = list(model.graph.node).index(node)
    for offset, new in enumerate(nodes):
        model.graph.node.insert(index + offset, new)


def add_constant(model: onnx.ModelProto, name: str, array: np.ndarray) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def replace_node(model: onnx.ModelProto, old: NodeProto, *new: NodeProto) -> None:
    insert_before(model, old, *new)
    model.graph.node.remove(old)


def attention_of(model: onnx.ModelProto, layer: int) -> NodeProto:
    """The Attention node of a layer; where it computes in float32, its heads are cast afterwards."""
    heads = node_of(model, f"blocks.{layer}.attention.heads")
    return heads if heads.op_type == "Attention" else node_of(model, heads.input[0])


# --- the faults -------------------------------------------------------------------------------------------------------


def upper_left_mask(model: onnx.ModelProto, layer: int) -> None:
    """A causal mask aligned to the upper left in place of the explicit one."""
    node = attention_of(model, layer)
    del node.input[3:]
    node.attribute.append(helper.make_attribute("is_causal", 1))


def half_split_rope(model: onnx.ModelProto, layer: int) -> None:
    node = next(
        n
        for n in model.graph.node
        if n.op_type == "RotaryEmbedding" and n.name.startswith(f"blocks.{layer}.attention.rope_q")
    )
    next(a for a in node.attribute if a.name == "interleaved").i = 0


def tiled_kv_heads(model: onnx.ModelProto, layer: int) -> None:
    """KV heads 0, 1, 0, 1 for query heads 0 … 3, instead of 0, 0, 1, 1."""
    node = attention_of(model, layer)
    for index in (1, 2):
        name = f"{node.input[index]}/tiled"
        insert_before(model, node, helper.make_node("Concat", [node.input[index]] * 2, [name], name=name, axis=1))
        node.input[index] = name


def swapped_gate_and_up(model: onnx.ModelProto, layer: int) -> None:
    split = node_of(model, f"blocks.{layer}.mlp.gate_proj")
    gate, up = split.output
    split.output[:] = [up, gate]


def spelled_out_norm(eps_inside: bool, weight_before_cast: bool) -> Fault:
    """attention_norm in single operators, with one of its two traps."""

    def fault(model: onnx.ModelProto, layer: int) -> None:
        name = f"blocks.{layer}.attention_norm"
        old = node_of(model, name)
        x, weight = old.input
        kind = next(t.data_type for t in model.graph.initializer if t.name == weight)
        if not any(t.name == "planted.eps" for t in model.graph.initializer):
            add_constant(model, "planted.eps", np.array([1e-5], np.float32))
            add_constant(model, "planted.axis", np.array([-1], np.int64))

        def make(op: str, inputs: list[str], output: str, **attributes) -> NodeProto:
            return helper.make_node(op, inputs, [output], name=output, **attributes)

        p = f"{name}/planted"
        nodes = [
            make("Cast", [x], f"{p}.wide", to=TensorProto.FLOAT),
            make("Mul", [f"{p}.wide"] * 2, f"{p}.square"),
            make("ReduceMean", [f"{p}.square", "planted.axis"], f"{p}.mean", keepdims=1),
        ]
        if eps_inside:
            nodes += [make("Add", [f"{p}.mean", "planted.eps"], f"{p}.sum"), make("Sqrt", [f"{p}.sum"], f"{p}.divisor")]
        else:
            nodes += [
                make("Sqrt", [f"{p}.mean"], f"{p}.root"),
                make("Add", [f"{p}.root", "planted.eps"], f"{p}.divisor"),
            ]
        nodes.append(make("Div", [f"{p}.wide", f"{p}.divisor"], f"{p}.normed"))
        if weight_before_cast:
            nodes += [
                make("Cast", [weight], f"{p}.weight", to=TensorProto.FLOAT),
                make("Mul", [f"{p}.normed", f"{p}.weight"], f"{p}.scaled"),
                make("Cast", [f"{p}.scaled"], name, to=kind),
            ]
        else:
            nodes += [make("Cast", [f"{p}.normed"], f"{p}.narrow", to=kind), make("Mul", [f"{p}.narrow", weight], name)]
        replace_node(model, old, *nodes)

    return fault


def shifted_cache_row(model: onnx.ModelProto, layer: int) -> None:
    """One layer's keys written one row too late."""
    node = node_of(model, f"present.{layer}.key")
    add_constant(model, "planted.one", np.array([1], np.int64))
    insert_before(
        model,
        node,
        helper.make_node("Add", [node.input[2], "planted.one"], ["planted.indices"], name="planted.indices"),
    )
    node.input[2] = "planted.indices"


def softmax_in_half(model: onnx.ModelProto, layer: int) -> None:
    """Attention in single operators, each rounded to half, also the exponentials and their sum."""
    node = attention_of(model, layer)
    queries, keys, values, mask = node.input
    add_constant(model, "planted.heads", np.array([0, 0, 1, 1], np.int64))
    add_constant(model, "planted.scale", np.array(0.25, np.float16))  # 1 / sqrt(16)
    add_constant(model, "planted.minus", np.array(-60000.0, np.float16))
    add_constant(model, "planted.axis", np.array([-1], np.int64))

    def make(op: str, inputs: list[str], output: str, **attributes) -> NodeProto:
        return helper.make_node(op, inputs, [output], name=output, **attributes)

    p = f"{node.output[0]}/planted"
    replace_node(
        model,
        node,
        make("Gather", [keys, "planted.heads"], f"{p}.keys", axis=1),
        make("Gather", [values, "planted.heads"], f"{p}.values", axis=1),
        make("Transpose", [f"{p}.keys"], f"{p}.turned", perm=[0, 1, 3, 2]),
        make("MatMul", [queries, f"{p}.turned"], f"{p}.products"),
        make("Mul", [f"{p}.products", "planted.scale"], f"{p}.scores"),
        make("Where", [mask, f"{p}.scores", "planted.minus"], f"{p}.masked"),
        make("ReduceMax", [f"{p}.masked", "planted.axis"], f"{p}.largest", keepdims=1),
        make("Sub", [f"{p}.masked", f"{p}.largest"], f"{p}.shifted"),
        make("Exp", [f"{p}.shifted"], f"{p}.exp"),
        make("ReduceSum", [f"{p}.exp", "planted.axis"], f"{p}.sum", keepdims=1),
        make("Div", [f"{p}.exp", f"{p}.sum"], f"{p}.weights"),
        make("MatMul", [f"{p}.weights", f"{p}.values"], node.output[0]),
    )


def causal_with_key_lengths(model: onnx.ModelProto) -> None:
    """Cached attention in every layer as the standard writes it: is_causal and nonpad_kv_seqlen, without a mask.

    onnxruntime computes it as the standard says. TensorRT's parser drops the lengths and masks from the upper left.
    """
    add_constant(model, "planted.axis", np.array([1], np.int64))
    lengths = helper.make_node(
        "ReduceSum", ["attention_mask", "planted.axis"], ["planted.lengths"], name="planted.lengths", keepdims=0
    )
    model.graph.node.insert(0, lengths)
    for node in model.graph.node:
        if node.op_type == "Attention":
            inputs = [*node.input[:3], "", "", "", "planted.lengths"]
            del node.input[:]
            node.input.extend(inputs)
            node.attribute.append(helper.make_attribute("is_causal", 1))


def scale_weight(bundle: Bundle, name: str, factor: float) -> Bundle:
    """Multiplies one weight of a copied bundle in its data file; the name has the layer numbers of the graph.

    Returns the whole bundle with a manifest that matches, as if the weight had been written so.
    """
    model = onnx.load(bundle.graph_path, load_external_data=False)
    held = ((tensor, dict(weight_places(tensor.name, bundle.manifest.config))) for tensor in model.graph.initializer)
    tensor, outputs = next((tensor, places[name].outputs) for tensor, places in held if name in places)
    where = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(bundle.folder / DATA_FILE, dtype=np.uint8, mode="r+")
    start, length = int(where["offset"]), int(where["length"])
    weights = (
        data[start : start + length]
        .view(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        .reshape(tensor.dims)[..., outputs]
    )
    weights[:] = (weights.astype(np.float32) * factor).astype(weights.dtype)
    data.flush()
    return relisted(bundle)
