"""One graph of a bundle with its data, opened for changes and written back with checksums that fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporter.bundle.bundle import Bundle, file_entry
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest


@dataclass
class Draft:
    """A graph in memory.

    Attributes:
        manifest: the manifest of the graph; of the part, where the unit has several.
        model: the graph, without its external data.
        data: the bytes of the data file, uint8 [size].
    """

    manifest: Manifest
    model: onnx.ModelProto
    data: np.ndarray

    @classmethod
    def read(cls, part: Bundle) -> Draft:
        data = np.fromfile(part.folder / DATA_FILE, np.uint8)
        return cls(part.manifest, onnx.load(part.graph_path, load_external_data=False), data)

    def copy(self) -> Draft:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return Draft(self.manifest, model, self.data.copy())

    def write(self, folder: Path) -> None:
        onnx.save(self.model, folder / GRAPH_FILE)
        self.data.tofile(folder / DATA_FILE)

    @property
    def nodes(self) -> list[NodeProto]:
        return list(self.model.graph.node)

    @property
    def stored(self) -> dict[str, TensorProto]:
        """The tensors whose values are in the data file, by name."""
        return {tensor.name: tensor for tensor in self.model.graph.initializer if tensor.external_data}

    def raw(self, name: str) -> np.ndarray:
        """Returns the bytes of a stored tensor, uint8; changes of it change the draft."""
        where = {entry.key: entry.value for entry in self.stored[name].external_data}
        start = int(where["offset"])
        return self.data[start : start + int(where["length"])]

    def array(self, name: str) -> np.ndarray:
        """Returns a stored tensor in its dtype and shape; changes of it change the draft. Not for 4 bits."""
        tensor = self.stored[name]
        return self.raw(name).view(helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tensor.dims)

    def constant(self, array: np.ndarray) -> str:
        """Adds a constant to the graph and returns its name."""
        names = {tensor.name for tensor in self.model.graph.initializer}
        name = next(f"planted.{number}" for number in range(len(names) + 1) if f"planted.{number}" not in names)
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def insert_before(self, node: NodeProto, operator: str, inputs: list[str], output: str, **attributes) -> str:
        """Adds a node before another one and returns the name of its output."""
        index = next(index for index, other in enumerate(self.model.graph.node) if other.output == node.output)
        self.model.graph.node.insert(index, helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def node_of(self, output: str) -> NodeProto:
        """Returns the node that makes a value."""
        return next(node for node in self.model.graph.node if output in node.output)


@dataclass(frozen=True)
class Mutation:
    """One change of one graph.

    Attributes:
        kind: the kind of fault, for counts.
        site: where it is, for reports.
        apply: makes the change in a copy of the draft that it was found in.
    """

    kind: str
    site: str
    apply: Callable[[Draft], None]


def write_mutant(good: Bundle, folder: Path, part: int, draft: Draft) -> Bundle:
    """Writes a copy of a bundle with another graph in one part, as a faulty exporter would: its checksums fit.

    Args:
        good: the bundle.
        folder: folder of the copy; an older copy there is replaced.
        part: number of the part, 0 where the unit is one graph.
        draft: what the part is replaced by.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good.folder, folder)
    place = folder / good.parts[part].folder.relative_to(good.folder)
    draft.write(place)
    manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    for name in (GRAPH_FILE, DATA_FILE):
        path = place / name
        manifest["files"][path.relative_to(folder).as_posix()] = file_entry(path)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return Bundle.read(folder)  # opening is one of the checks under trial
