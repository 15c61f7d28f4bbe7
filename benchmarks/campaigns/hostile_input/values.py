"""Hostile values, and random mutations of JSON documents as data and as text."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

SECRET = "q7-planted-secret-which-nothing-may-repeat"
FOREIGN_PATHS = (
    "../outside/secret.json", "../outside/secret.bin", "/etc/hostname", "/proc/self/environ", "/dev/zero",
    "./../outside/secret.bin", "part0/../../outside/secret.bin", "sub/../../outside/secret.bin", "..", ".", "", "/",
    "link.bin", "folder", "pipe", "manifest.json", "model.onnx", "..\\outside\\secret.bin", "model.onnx.data\0",
    "file:///etc/hostname", "~/secret", "*",
)  # fmt: skip


def deep(depth: int, leaf: Any = 0) -> Any:
    """Returns lists in lists, `depth` deep."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**8,
    10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "a", "fp16", "model", "x" * 100_000, "\ud800", "\0", "\x1b]0;owned\x07\x1b[31m", "[/bold]", "[link=x]",
    "two\nlines", "{}", "%s%n", "١", "−1", "1" * 5000, "0x10", "1e5", "NaN", "--help", "-o", "\u202egpj.exe", "é" * 300,
)  # fmt: skip
TREES = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    {"a": [1, {"b": None}]},
    deep(50),
    deep(400),
    ["x"] * 10_000,
    list(range(1000)),
)


def hostile_value(rng: Random) -> Any:
    """Returns a random hostile value; a mutable one is a deep copy."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS, FOREIGN_PATHS, TREES))))


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) below the root of a document."""
    found, queue = [], [data]
    while queue:
        container = queue.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            found.append((container, key))
            if isinstance(value, dict | list):
                queue.append(value)
    return found


def mutate(data: Any, rng: Random) -> Any:
    """Returns the document with one to three random changes; changes it in place where possible."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(data) if isinstance(data, dict | list) else []
        if not places or rng.random() < 0.01:
            return hostile_value(rng)
        _change(*rng.choice(places), places, rng)
    return data


def _change(container: Any, key: Any, places: list, rng: Random) -> None:
    value = container[key]
    how = rng.randrange(8)
    if how <= 2:
        container[key] = hostile_value(rng)
    elif how == 3:
        del container[key]
    elif how == 4 and isinstance(value, int | float):
        container[key] = rng.choice((value + 1, value - 1, value * 2, -value, value * 10**6, float(value), str(value)))
    elif how == 5:
        other, at = rng.choice(places)
        if at in other if isinstance(other, dict) else at < len(other):
            container[key] = copy.deepcopy(other[at])
    elif how == 6 and isinstance(container, dict):
        container[str(hostile_value(rng))[:200]] = container.pop(key)
    elif isinstance(value, list) and value:
        container[key] = rng.choice((value * 2, value[::-1], value[1:], [value], dict(enumerate(map(str, value)))))
    else:
        container[key] = [value]


def to_text(data: Any) -> bytes:
    """Returns JSON with any numbers, and lone surrogates as escapes."""
    return json.dumps(data).encode()


def damage_text(text: bytes, rng: Random) -> bytes:
    """Returns damaged JSON, or JSON that parsers disagree about."""
    how = rng.randrange(10)
    at = rng.randrange(len(text) + 1)
    if how == 0:
        return text[:at]
    if how == 1:
        return b"\xef\xbb\xbf" + text
    if how == 2:
        return text[:at] + bytes([rng.randrange(256)]) + text[at:]
    if how == 3:
        return text.replace(b"{", b'{"format_version": 99, "": NaN, ', 1)
    if how == 4:
        return text.replace(b":", b": " + rng.choice((b"[" * 100_000, b'{"a":' * 100_000)), 1)
    if how == 5:
        return text + rng.choice((b"{}", b"\0", b" " * 10**6, text))
    if how == 6:
        return text.replace(b":", b": " + b"9" * rng.choice((20, 400, 5000)) + b", " + b'"x":', 1)
    if how == 7:
        return text.decode("utf-8", "replace").encode("utf-16")
    if how == 8:
        first = text.find(b'"', 1)
        return text[:first] + text[first:].replace(b"\n", b'\n "unit": {"kind": "model"},\n', 1)
    return flip_bytes(text, rng)


def flip_bytes(data: bytes, rng: Random) -> bytes:
    """Returns the bytes with some bits flipped, or with a run zeroed, repeated, removed or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        length = rng.choice((1, 2, 8, 100))
        how = rng.randrange(6)
        if how <= 2:
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 3:
            changed[at : at + length] = bytes(len(changed[at : at + length]))
        elif how == 4:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + length] = rng.choice((b"", b"\xff" * length, rng.randbytes(length)))
    return bytes(changed)
