"""Runs only the matrix products of one decode step. Our step is compared with them in the same process."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from exporter.bundle.bundle import Bundle
from exporter.steppers.onnxruntime_stepper import open_session

PRODUCTS = ("MatMul", "Gemm", "MatMulNBits")


class BareProducts:
    """A session over a bundle's products with stored weights, each with a constant input of one token.

    Attributes:
        batch: number of sequences in a step.
    """

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self.batch = batch
        graph = bare_graph(onnx.load(bundle.graph_path, load_external_data=False))
        self._session = open_session(graph.SerializeToString(), data_folder=bundle.folder)
        generator = np.random.default_rng(0)
        self._feeds = {
            value.name: generator.standard_normal((batch, *value.shape[1:]), np.float32)
            for value in self._session.get_inputs()
        }

    def run(self) -> None:
        self._session.run(None, self._feeds)


def bare_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a graph of the products whose weight comes from initializers only, with the nodes that make that weight.

    Products of one width share an input: float32 [batch_size, 1, width], or [batch_size, width] for a Gemm.
    Each product has an output of its own.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    kept: list[onnx.NodeProto] = []
    inputs: dict[str, onnx.ValueInfoProto] = {}
    outputs = []
    for node in model.graph.node:
        if node.op_type not in PRODUCTS:
            continue
        made_of = _constant_ancestors(node.input[1], initializers, producers)
        if made_of is None:
            continue
        kept.extend(other for other in made_of if other not in kept)
        product = onnx.NodeProto()
        product.CopyFrom(node)
        width = _inner_width(node, initializers, producers)
        rank = 2 if node.op_type == "Gemm" else 3
        product.input[0] = f"x.{rank}.{width}"
        shape = ["batch_size", width] if rank == 2 else ["batch_size", 1, width]
        inputs[product.input[0]] = helper.make_tensor_value_info(product.input[0], onnx.TensorProto.FLOAT, shape)
        kept.append(product)
        outputs.append(helper.make_tensor_value_info(product.output[0], onnx.TensorProto.FLOAT, None))
    used = {name for node in kept for name in node.input}
    weights = [tensor for name, tensor in initializers.items() if name in used]
    graph = helper.make_graph(kept, "products", list(inputs.values()), outputs, weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _constant_ancestors(
    name: str, initializers: dict[str, onnx.TensorProto], producers: dict[str, onnx.NodeProto]
) -> list[onnx.NodeProto] | None:
    """Returns the nodes that make a value from initializers, in order; None where it needs other inputs."""
    if name in initializers or not name:
        return []
    if name not in producers:
        return None
    made_of: list[onnx.NodeProto] = []
    for source in producers[name].input:
        ancestors = _constant_ancestors(source, initializers, producers)
        if ancestors is None:
            return None
        made_of.extend(ancestors)
    return [*made_of, producers[name]]


def _inner_width(
    node: onnx.NodeProto, initializers: dict[str, onnx.TensorProto], producers: dict[str, onnx.NodeProto]
) -> int:
    """Returns the number of features that a product sums over."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if "K" in attributes:
        return attributes["K"]
    name, transposed = node.input[1], bool(attributes.get("transB", 0))
    while name not in initializers:  # of the nodes that make a weight only Transpose changes its shape
        transposed ^= producers[name].op_type == "Transpose"
        name = producers[name].input[0]
    return initializers[name].dims[1 if transposed else 0]
