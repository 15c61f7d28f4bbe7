"""Hostile checkpoints: config.json, safetensors and their index, params.json, and .pth files with code in them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.campaigns.hostile_input.doors import HUGGINGFACE_DOORS, META_DOORS, Door, draw
from benchmarks.campaigns.hostile_input.inputs.bundles import mutate_json_file
from benchmarks.campaigns.hostile_input.inputs.data_files import mutate_data
from benchmarks.campaigns.hostile_input.values import FOREIGN_PATHS, flip_bytes, hostile_value, mutate, to_text


def _other_file(path: Path, rng: Random) -> None:
    """Replaces a file by another kind of file, but no link to the secret: weights may be behind a link anywhere."""
    mutate_data(path, rng, links_out=False)


def _copy(originals: Path, folder: Path, name: str) -> None:
    shutil.copytree(originals / name, folder)


def config(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Changes config.json, generation_config.json or the tokenizer's files."""
    _copy(originals, folder, "huggingface")
    how = rng.random()
    if how < 0.75:
        mutate_json_file(folder / "config.json", rng)
    elif how < 0.9:
        (folder / "generation_config.json").write_bytes(to_text(mutate({"eos_token_id": [1, 2], "max_length": 3}, rng)))
    else:
        mutate_data(folder / rng.choice(("tokenizer.json", "config.json")), rng)
    return draw(HUGGINGFACE_DOORS, rng, 1)


def safetensors(originals: Path, folder: Path, rng: Random) -> list[Door]:
    _copy(originals, folder, "huggingface")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    how = rng.randrange(8)
    if how == 0:
        _other_file(path, rng)
        return draw(HUGGINGFACE_DOORS, rng, 1)
    if how == 1:
        path.write_bytes(flip_bytes(data[: len(data) // 8], rng) + data[len(data) // 8 :])
        return draw(HUGGINGFACE_DOORS, rng, 1)
    if how <= 5:
        header = to_text(_mutated_header(json.loads(header), rng))
    elif how == 6:
        first = header.find(b'"', 2)
        header = header[:1] + header[1:first] + header[first:-1] + b"," + header[1:]  # every name twice
    else:
        header = flip_bytes(header, rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 7, 2**20, 2**31, 2**62, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", stated) + header + body)
    return draw(HUGGINGFACE_DOORS, rng, 1)


def _mutated_header(header: dict, rng: Random) -> Any:
    if rng.random() < 0.4:
        return mutate(header, rng)
    names = [name for name in header if name != "__metadata__"]
    one, other = header[rng.choice(names)], header[rng.choice(names)]
    how = rng.randrange(6)
    if how == 0:
        one["data_offsets"] = other["data_offsets"]
    elif how == 1:
        one["dtype"] = rng.choice(("F64", "F8_E4M3", "I64", "BOOL", "F16", "BF16", "F4", "U8", "C64"))
    elif how == 2:
        one["shape"] = rng.choice(
            (one["shape"][::-1], [], [0], [2**40, 2**40], [-1, 4], one["shape"] + [1], [1] * 1000)
        )
    elif how == 3:
        header[
            rng.choice(
                ("lm_head.weight", "model.layers.2.mlp.up_proj.weight", "x" * 10_000, "\x1b[31m", "model.norm.weight ")
            )
        ] = dict(one)
    elif how == 4:
        start, stop = one["data_offsets"]
        one["data_offsets"] = rng.choice(
            ([stop, start], [start, start], [start + 1, stop + 1], [2**63, 2**64 - 1], [0, 2**40])
        )
    else:
        del header[rng.choice(names)]
    return header


def index(originals: Path, folder: Path, rng: Random) -> list[Door]:
    _copy(originals, folder, "sharded")
    path = folder / "model.safetensors.index.json"
    how = rng.randrange(4)
    if how == 0:
        mutate_json_file(path, rng)
    elif how == 3:
        _other_file(rng.choice(sorted(folder.glob("*.safetensors"))), rng)
    else:
        data = json.loads(path.read_text())
        name = rng.choice(list(data["weight_map"]))
        data["weight_map"][name] = rng.choice(FOREIGN_PATHS) if how == 1 else hostile_value(rng)
        path.write_bytes(to_text(data))
    return draw(HUGGINGFACE_DOORS, rng, 1)


# --- Meta -------------------------------------------------------------------------------------------------------


class _Call:
    """Pickles as a call that a plain unpickler makes."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def _payloads(canary: Path) -> list[Any]:
    import builtins
    import os
    import subprocess

    touch = f"open({str(canary)!r}, 'w').close()"
    return [
        _Call(os.system, f"touch '{canary}'"), _Call(builtins.exec, touch), _Call(builtins.eval, f"exec({touch!r})"),
        _Call(subprocess.Popen, ("touch", str(canary))), _Call(open, str(canary), "w"), _Call(bytearray, 2**36),
        _Call(torch.zeros, 2**33), _Call(getattr, "text", "format"), _Call(torch.Size, (2**40,)),
        _Call(os.mkfifo, str(canary)), _Call(print, "x"),
        _Call(torch._utils._rebuild_parameter, torch.zeros(2), True, {}), _Call(__import__, "antigravity"),
    ]  # fmt: skip


def params(originals: Path, folder: Path, rng: Random) -> list[Door]:
    _copy(originals, folder, "meta")
    mutate_json_file(folder / "params.json", rng)
    return draw(META_DOORS, rng, 1)


def pth(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Makes a shard of unusual tensors, of code, or of a zip archive with false entries."""
    _copy(originals, folder, "meta")
    path = folder / rng.choice(("consolidated.00.pth", "consolidated.01.pth"))
    rng.choice((_strange_tensors, _code, _legacy_code, _damaged_zip, _lying_zip, _lying_pickle, _other_file))(path, rng)
    return draw(META_DOORS, rng, 1)


def _strange_tensors(path: Path, rng: Random) -> None:
    shard = torch.load(path, weights_only=True)
    name = rng.choice(list(shard))
    tensor = shard[name]
    shard[name] = rng.choice(
        (
            tensor.to_sparse(), torch.empty(tensor.shape, device="meta"), tensor.double(), tensor.to(torch.int8),
            tensor.to(torch.complex64), torch.zeros(1).expand(tensor.shape), tensor[:0], torch.zeros(()),
            torch.zeros(1).expand(2**40), torch.zeros(1).expand(2**20, 64), torch.nn.Parameter(tensor),
            torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), tensor.to(torch.float8_e4m3fn),
            torch.full_like(tensor, float("nan")), torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            tensor.t().contiguous().t(), [tensor], {"a": tensor}, "text", None,
            tensor.to_sparse_csr() if tensor.dim() == 2 else tensor.to_sparse(), torch.Size([1, 2]),
            tensor.conj() if tensor.is_complex() else tensor.requires_grad_(),
        )
    )  # fmt: skip
    if rng.random() < 0.2:
        shard[rng.choice((3, "", "x" * 1000, "\x1b[31m", "rope.freqs", ("a",)))] = shard.pop(name)
    torch.save(shard, path)


def _code(path: Path, rng: Random) -> None:
    shard = torch.load(path, weights_only=True)
    payload = rng.choice(_payloads(_canary(path)))
    torch.save(rng.choice(({**shard, "norm.weight": payload}, {**shard, "extra": payload}, payload, [payload])), path)


def _canary(path: Path) -> Path:
    return path.parent.parent / "outside" / "canary"


def _legacy_code(path: Path, rng: Random) -> None:
    payload = {"norm.weight": rng.choice(_payloads(_canary(path)))}
    if rng.random() < 0.5:
        torch.save(payload, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(payload, protocol=rng.randrange(6)))


def _damaged_zip(path: Path, rng: Random) -> None:
    data = path.read_bytes()
    part = rng.choice((data[:4000], data[-3000:]))
    changed = flip_bytes(part, rng)
    path.write_bytes(changed + data[4000:] if part == data[:4000] else data[:-3000] + changed)


def _records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _lying_zip(path: Path, rng: Random) -> None:
    """Writes an archive with a bomb, missing, shortened or compressed records, or names that lead out of it."""
    records = _records(path)
    prefix = next(iter(records)).partition("/")[0]
    how = rng.randrange(6)
    compression = zipfile.ZIP_DEFLATED if how in (0, 5) else zipfile.ZIP_STORED
    if how == 0:
        records[f"{prefix}/data/0"] = bytes(rng.choice((2**20, 2**28)))
    elif how == 1:
        del records[rng.choice(list(records))]
    elif how == 2:
        records[f"{prefix}/data/0"] = records[f"{prefix}/data/0"][: rng.randrange(64)]
    elif how == 3:
        records = {rng.choice(("../../outside/canary", "/tmp/x", "..", "/")): b"x", **records}
    elif how == 4:
        records = {
            name.replace(prefix, rng.choice(("..", "", "a/../../b"))): content for name, content in records.items()
        }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        if how == 5:
            archive.writestr(f"{prefix}/.data/serialization_id", bytes(2**26))
    path.write_bytes(buffer.getvalue())


def _lying_pickle(path: Path, rng: Random) -> None:
    """Changes opcodes and numbers of the pickle in the archive: sizes, strides, offsets, globals."""
    records = _records(path)
    name = next(name for name in records if name.endswith("data.pkl"))
    content = records[name]
    how = rng.randrange(5)
    if how == 0:
        content = content.replace(
            b"FloatStorage", rng.choice((b"DoubleStorage", b"LongStorage", b"UntypedStorage", b"FloatTensor"))[:12], 1
        )
    elif how == 1:
        content = content.replace(
            b"K@",
            rng.choice((b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff")),
            rng.choice((1, 2, 9)),
        )
    elif how == 2:
        content = content.replace(
            b"torch._utils\n_rebuild_tensor_v2", rng.choice((b"os\nsystem", b"torch._utils\n_rebuild_tensor_v3")), 1
        )
    elif how == 3:
        content = rng.choice(
            (
                b"(" * 10**6,
                b"]" * 10**5 + b".",
                b"\x80\x02}q\x00" + b"K\x01" * 10**6,
                b"\x8b\xff\xff\xff\x7f" + b"1" * 100,
                b"",
            )
        )
    else:
        content = flip_bytes(content, rng)
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, content if record == name else data)


KINDS = {"config": config, "safetensors": safetensors, "shard index": index, "params": params, "pth": pth}
