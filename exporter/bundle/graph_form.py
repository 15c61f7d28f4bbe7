"""Checks that an untrusted graph file has the form of this project's exports, before any library parses it.

A bundle may come from anybody, and ONNX allows much: data from any path, code of other domains, loops, tensors larger
than their data. Runtimes in C++ may crash on such files. An export uses a small part of the format, so this check
refuses everything outside of that part. `exporter.bundle.graph_messages` reads the file, and this module checks what
its parts say together. `exporter.graph.contract_check` checks the contract: what the graph of this form computes with.

This check does not bound the memory of a graph that was made by hand out of allowed operators: a chain of outer
products grows without a large number in it.
"""

from __future__ import annotations

import math
from pathlib import Path

from exporter.bundle.graph_messages import INT64, Graph, Initializer, Node, decimal, read_model
from exporter.bundle.manifest import DATA_FILE, Manifest
from exporter.spec.dtypes import ONNX_NAMES, stored_bytes
from exporter.spec.weight_formats import QUANTIZED_TENSORS, WEIGHT_FORMATS

BYTES_PER_LAYER = 64 * 1024  # an export has about 9 kB per layer
NODES_PER_LAYER = 128  # an export has about 35
EDGE_LAYERS = 8  # the nodes before and after the layers count as so many layers


def check_graph_form(path: Path, manifest: Manifest) -> None:
    """Checks that a graph file has the form that exports have. It reads this file and the size of the data file only.

    Args:
        path: the graph file; the data file is beside it.
        manifest: manifest of the bundle, or of the part that the graph is. It has the tensors of the graph, the
            format of the weights, and the bound of all integers in shapes.

    Raises:
        ValueError: the form is another one; the message says what was found.
    """
    n_layers = len(manifest.contract.inputs) // 2 + EDGE_LAYERS
    size = path.stat().st_size
    if size > BYTES_PER_LAYER * n_layers:
        raise ValueError(
            f"it has {size:,} bytes, expected at most {BYTES_PER_LAYER * n_layers:,} for a graph of these inputs"
        )
    try:
        graph = read_model(memoryview(path.read_bytes()), NODES_PER_LAYER * n_layers)
        _Form(manifest, (path.parent / DATA_FILE).stat().st_size).check(graph)
    except ValueError as error:
        raise ValueError(f"it is not a graph as an export writes it ({str(error)[:300]})") from None


class _Form:
    """The form of the graph of one manifest.

    Each method checks one part of it and raises ValueError with the problem.
    """

    def __init__(self, manifest: Manifest, data_bytes: int) -> None:
        self._manifest, self._data_bytes = manifest, data_bytes

    def check(self, graph: Graph) -> None:
        tensors = graph.initializers
        for tensor in tensors:
            self._check_bytes(tensor)
        ends = [decimal(tensor.external["offset"]) + tensor.n_bytes for tensor in tensors if tensor.external]
        if max(ends, default=0) != self._data_bytes:
            raise ValueError(
                f"its weights end at {max(ends, default=0):,}, expected {self._data_bytes:,}, the end of {DATA_FILE}"
            )
        contract = self._manifest.contract
        sides = {"inputs": (graph.inputs, contract.inputs), "outputs": (graph.outputs, contract.outputs)}
        for what, (found, specs) in sides.items():
            if found != list(specs):
                raise ValueError(f"its {what} are not those of the manifest")
        self._check_numbers(graph.nodes, tensors)
        self._check_wiring(graph.nodes, [spec.name for spec in contract.inputs] + [tensor.name for tensor in tensors])
        self._check_quantized(graph.nodes, {tensor.name: tensor for tensor in tensors})

    def _check_quantized(self, nodes: list[Node], tensors: dict[str, Initializer]) -> None:
        """Checks that one DequantizeLinear makes each quantized weight, and alone reads the tensors of that weight."""
        own = {part for node in nodes if node.operator == "DequantizeLinear" for part in self._parts(node, tensors)}
        others = (node for node in nodes if node.operator != "DequantizeLinear")
        read_elsewhere = own.intersection(name for node in others for name in node.inputs)
        if read_elsewhere:
            raise ValueError(
                f"{min(read_elsewhere)[:80]} is read by another node than the DequantizeLinear that it belongs to"
            )
        for name in tensors.keys() - own:
            if ONNX_NAMES[tensors[name].kind] in WEIGHT_FORMATS or name.rpartition(".")[2] in QUANTIZED_TENSORS:
                raise ValueError(f"{name[:80]} is part of a weight in integers, and no DequantizeLinear reads it")

    def _parts(self, node: Node, tensors: dict[str, Initializer]) -> list[str]:
        """Checks the tensors from which a DequantizeLinear makes a weight, and returns their names."""
        name, weight_format = node.outputs[0], self._manifest.weight_format
        if weight_format is None:
            raise ValueError(f"{name[:80]} is made of integers, and the manifest has no weight_format")
        weight_format = weight_format.of(name)
        integers = tensors.get(f"{name}.integers", Initializer()).dims
        if len(integers) != 2 or integers[0] % weight_format.block_size:
            block = weight_format.block_size
            raise ValueError(f"{name[:80]}.integers: dims {integers[:8]}, expected a matrix of whole blocks of {block}")
        parts = weight_format.tensors((integers[0], integers[1]), self._manifest.dtype)
        expected = {f"{name}.{part}": tensor for part, tensor in parts.items()}
        if node.inputs != list(expected) or len(node.outputs) != 1:
            raise ValueError(f"{name[:80]} is made of {node.inputs[:4]}, expected {list(expected)}")
        attributes = {"axis": 0, "block_size": weight_format.block_size}
        if node.attributes != attributes:
            raise ValueError(f"{name[:80]} is made with {node.attributes}, expected {attributes}")
        for part, (dtype, shape) in expected.items():
            tensor = tensors.get(part, Initializer())
            if (ONNX_NAMES.get(tensor.kind), tuple(tensor.dims)) != (dtype, shape) or not tensor.external:
                place = "" if tensor.external else " in the graph"
                got = f"{ONNX_NAMES.get(tensor.kind, 'nothing')} {tensor.dims[:8]}{place}"
                raise ValueError(f"{part[:80]}: {got}, expected {dtype} {list(shape)} in {DATA_FILE}")
        return list(expected)

    def _check_wiring(self, nodes: list[Node], given: list[str]) -> None:
        """Checks that each value is made once and then read, so that the graph has no cycle."""
        known = set(given)
        if len(known) != len(given) or "" in known:
            raise ValueError("two inputs or weights of one name")
        for node in nodes:
            missing = [name for name in node.inputs if name and name not in known]
            if missing or known.intersection(node.outputs) or "" in node.outputs or not node.outputs:
                raise ValueError(
                    f"a node reads {missing[:3]} and makes {node.outputs[:3]}: each value is made once and then read"
                )
            known.update(node.outputs)
        if not known.issuperset(spec.name for spec in self._manifest.contract.outputs):
            raise ValueError("no node makes some of its outputs")

    def _check_bytes(self, tensor: Initializer) -> None:
        """Checks that the bytes of a tensor are where an export puts them, and as many as its dims and type need."""
        if bool(tensor.external) == (tensor.raw is not None):
            raise ValueError(f"{tensor.name[:80]}: expected its data in the graph or beside it, and not both")
        if tensor.raw is not None:
            if len(tensor.raw) != tensor.n_bytes:
                raise ValueError(f"{tensor.name[:80]}: {len(tensor.raw)} bytes, expected {tensor.n_bytes}")
            return
        where = tensor.external
        if set(where) != {"location", "offset", "length"} or where["location"] != DATA_FILE:
            raise ValueError(f"{tensor.name[:80]}: its data is at {str(where)[:200]}, expected a place in {DATA_FILE}")
        offset, length = decimal(where["offset"]), decimal(where["length"])
        aligned = offset % stored_bytes(ONNX_NAMES[tensor.kind], ()) == 0
        if tensor.kind == INT64 or length != tensor.n_bytes or not aligned or offset + length > self._data_bytes:
            raise ValueError(
                f"{tensor.name[:80]}: {length} bytes at {offset} for dims {tensor.dims} of type {tensor.kind}, "
                f"in a file of {self._data_bytes}"
            )

    def _check_numbers(self, nodes: list[Node], tensors: list[Initializer]) -> None:
        """Checks that no integer, and no product of the integers of one tensor, is larger than the model's own sizes.

        Integers are shapes, bounds and indices. The product is not checked where a Split alone reads them, as its
        widths.
        """
        largest = self._manifest.largest_number
        widths = {node.inputs[1] for node in nodes if node.operator == "Split" and len(node.inputs) == 2}
        widths -= {name for node in nodes for i, name in enumerate(node.inputs) if (node.operator, i) != ("Split", 1)}
        for tensor in (tensor for tensor in tensors if tensor.kind == INT64):
            numbers = list(memoryview(bytes(tensor.raw or b"")).cast("q"))
            held = 1 if tensor.name in widths else math.prod(n for n in numbers if n > 0)
            if held > largest or any(abs(n) > largest for n in numbers):
                raise ValueError(f"{tensor.name[:80]}: numbers {numbers[:8]}, expected none beyond {largest}")
