"""Mutations of the places in a graph that say where a weight's bytes are."""

from __future__ import annotations

from pathlib import Path
from random import Random

import onnx
from onnx import ModelProto, TensorProto

from benchmarks.campaigns.hostile_input.inputs.graphs import HUGE, constant_from_outside, point_outside, subgraph
from benchmarks.campaigns.hostile_input.values import FOREIGN_PATHS


def _external(model: ModelProto, rng: Random) -> TensorProto:
    found = [tensor for tensor in model.graph.initializer if tensor.external_data]
    return rng.choice(found) if found else model.graph.initializer.add(name="added", data_type=1, dims=[4])


def _where(tensor: TensorProto) -> dict[str, str]:
    return {"location": "model.onnx.data", "offset": "0", "length": "16"} | {
        e.key: e.value for e in tensor.external_data
    }


def elsewhere(model: ModelProto, rng: Random) -> None:
    """Changes the location of one tensor or of all tensors."""
    location = rng.choice(FOREIGN_PATHS)
    one = _external(model, rng)
    for tensor in [one] if rng.random() < 0.8 else [t for t in model.graph.initializer if t.external_data]:
        where = _where(tensor)
        point_outside(tensor, location, *((0, None) if rng.random() < 0.2 else (where["offset"], where["length"])))


NUMBERS = (
    "-1", "-4096", "0", "1", "4095", "4096", "1e3", "", " 8", "0x10", "nan", "9" * 30, "9" * 5000, str(2**63 - 1),
    str(2**64), "١", "1_0", "+16",
)  # fmt: skip


def other_numbers(model: ModelProto, rng: Random) -> None:
    tensor = _external(model, rng)
    where = _where(tensor) | {rng.choice(("offset", "length")): rng.choice(NUMBERS)}
    point_outside(tensor, where["location"], where["offset"], where["length"])


def other_keys(model: ModelProto, rng: Random) -> None:
    tensor = _external(model, rng)
    if rng.random() < 0.5 and tensor.external_data:
        del tensor.external_data[rng.randrange(len(tensor.external_data))]
    else:
        key = rng.choice(("location", "offset", "length", "basepath", "checksum", "\0", "other"))
        tensor.external_data.add(key=key, value=rng.choice((*NUMBERS, *FOREIGN_PATHS)))
    if rng.random() < 0.2:
        tensor.data_location = rng.choice((TensorProto.DEFAULT, TensorProto.EXTERNAL))


def other_dims(model: ModelProto, rng: Random) -> None:
    """Changes dims or type, so that they do not match the bytes."""
    tensor = _external(model, rng)
    if rng.random() < 0.5 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(HUGE)
    else:
        tensor.data_type = rng.choice((2, 7, 8, 10, 11, 14, 16, 17, 22, 99))


EXTERNAL_MUTATIONS = (
    elsewhere,
    elsewhere,
    other_numbers,
    other_numbers,
    other_keys,
    other_dims,
    subgraph,
    constant_from_outside,
)


def mutate_external(path: Path, rng: Random) -> None:
    """Changes files, offsets and lengths of the weights in a graph file."""
    model = onnx.load_from_string(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(EXTERNAL_MUTATIONS)(model, rng)
    path.write_bytes(model.SerializeToString())
