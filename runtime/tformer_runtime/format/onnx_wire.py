"""Protobuf's wire format, read and written by hand: https://protobuf.dev/programming-guides/encoding

A message is a sequence of fields. Each field is a tag, which holds the field's number and wire type, followed by its
content. A reader goes from field to field and skips large ones, so that no package is needed. `onnx_fields` has the
field numbers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

VARINT, BYTES = 0, 2  # wire types: a number; content with a length, such as a text, a message or packed numbers
_FIXED_BYTES = {1: 8, 5: 4}  # wire type → bytes of a number of fixed length


class WireError(Exception):
    """The bytes are not a message, or end too early."""


class Field(NamedTuple):
    """One field of a message.

    number: the field number.
    content: the bytes of the content; empty for a varint.
    encoded: all bytes of the field, with its tag.
    """

    number: int
    content: bytes
    encoded: bytes


def varint(number: int) -> bytes:
    """Encode a non-negative number in groups of 7 bits, the lowest group first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def tag(number: int, wire_type: int) -> bytes:
    """Encode the tag of a field. number: the field number."""
    return varint(number << 3 | wire_type)


def bytes_field(number: int, content: bytes) -> bytes:
    """Encode a field that holds bytes: a text or another message. number: the field number."""
    return tag(number, BYTES) + varint(len(content)) + content


def varint_field(number: int, value: int) -> bytes:
    """Encode a field that holds a non-negative number. number: the field number."""
    return tag(number, VARINT) + varint(value)


def iter_fields(content: bytes) -> Iterator[Field]:
    """Yield the fields of a message, in their order. Raise WireError if the bytes are not a message."""
    stream = io.BytesIO(content)
    while (begin := stream.tell()) < len(content):
        number, length = read_field_header(stream, len(content))
        start = stream.tell()
        end = stream.seek(length, io.SEEK_CUR)
        yield Field(number, content[start:end], content[begin:end])


def read_field_header(file: BinaryIO, end: int) -> tuple[int, int]:
    """Read a tag and return the field's number and the bytes of content that follow.

    The value of a varint is read as well, so that its content has 0 bytes.
    Raise WireError if no field begins here, or if the field extends beyond `end`.
    """
    header = _read_varint(file)
    number, wire_type = header >> 3, header & 7
    length = _FIXED_BYTES.get(wire_type, 0)
    if wire_type == VARINT:
        _read_varint(file)
    elif wire_type == BYTES:
        length = _read_varint(file)
    elif wire_type not in _FIXED_BYTES:
        raise WireError
    if number == 0 or file.tell() + length > end:
        raise WireError
    return number, length


def _read_varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise WireError
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise WireError
