"""Reads protobuf's wire format field by field, to check an untrusted model file before a library opens it.

The encoding is documented at protobuf.dev/programming-guides/encoding. Groups are refused, because ONNX does not use
them. `exporter.bundle.graph_form` checks the messages that these fields make.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

# Field number, wire type, and value: a number, or the bytes of a text, a message or a fixed-size number.
Field = tuple[int, int, int | memoryview]


def fields(data: memoryview) -> Iterator[Field]:
    """Yields the fields of one message in file order. The caller parses what is inside a field.

    Raises:
        ValueError: the data are not in the wire format.
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"field {number} of wire type {kind}")
        if number == 0 or at + length > end:
            raise ValueError(f"field {number} ends beyond its message")
        yield number, kind, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of at most 64 bits, and the position after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number without an end")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at


def signed(value: int) -> int:
    """Returns a varint as int64."""
    return value - 2**64 if value >= 2**63 else value


def int64s(kind: int, value: int | memoryview) -> Iterator[int]:
    """Yields the one number of a repeated int64 field, or all of its numbers where the field is packed.

    Raises:
        ValueError: the field has another type.
    """
    if kind == VARINT and isinstance(value, int):
        yield signed(value)
        return
    if kind != BYTES or isinstance(value, int):
        raise ValueError("not a list of whole numbers")
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield signed(number)


def text(kind: int, value: int | memoryview) -> str:
    """Returns the value of a string field.

    Raises:
        ValueError: the field has another type, or is not UTF-8.
    """
    if kind != BYTES:
        raise ValueError("not a text")
    return bytes(value).decode("utf-8")
