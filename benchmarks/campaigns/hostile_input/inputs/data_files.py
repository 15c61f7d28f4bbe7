"""Mutations of a file as a whole: other content, another size, or another kind of file."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.campaigns.hostile_input.values import flip_bytes


def mutate_data(path: Path, rng: Random, links_out: bool = True) -> None:
    """Replaces a file by a shorter, longer or poisoned one, by a link, or by a pipe, folder or socket."""
    content = path.read_bytes()
    how = rng.choice([how for how in range(12) if links_out or how != 4])
    outside = (
        path.parent / ".." / "outside"
        if (path.parent / ".." / "outside").is_dir()
        else path.parent / ".." / ".." / "outside"
    )
    path.unlink()
    if how == 0:
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == 1:
        path.write_bytes(content + rng.randbytes(rng.choice((1, 4096))))
    elif how == 2:
        path.write_bytes(
            np.full(len(content) // 4, rng.choice((np.nan, np.inf, 1e38)), np.float32).tobytes()
            + bytes(len(content) % 4)
        )
    elif how == 3:
        path.write_bytes(flip_bytes(content, rng))
    elif how == 4:
        path.symlink_to(rng.choice((outside / "secret.bin", outside / "secret.json", Path("/etc/hostname"))))
    elif how == 5:
        path.symlink_to(
            rng.choice(("/dev/zero", "/dev/null", "/proc/self/environ", "/proc/self/mem", "nowhere", path.name))
        )
    elif how == 6:
        (path.parent / "moved").write_bytes(content)
        path.symlink_to("moved")
    elif how == 7:
        (path.parent / "moved").write_bytes(content)
        os.link(path.parent / "moved", path)
    elif how == 8:
        os.mkfifo(path)
    elif how == 9:
        path.mkdir()
    elif how == 10:
        with socket.socket(socket.AF_UNIX) as listener:
            folder = os.open(path.parent, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path of a socket may not be long
            os.close(folder)
    else:
        with open(path, "wb") as file:
            file.truncate(rng.choice((0, 1, 2**26, 2**42)))
