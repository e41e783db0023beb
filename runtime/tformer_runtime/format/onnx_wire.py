"""Protobuf's wire format, read and written by hand: https://protobuf.dev/programming-guides/encoding

A message is a row of fields: a tag, which holds the field's number and the kind of what follows, and its content. So
one field after the other is read, what is large is skipped, and no package is needed for it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

VARINT, BYTES = 0, 2  # kinds of content: a number, and what has a length: texts, messages, packed numbers
_FIXED = {1: 8, 5: 4}  # kind → bytes of a number of fixed length


class WireError(Exception):
    """The bytes are not a message, or end too early."""


class Field(NamedTuple):
    """number: of the field. content: its bytes, none of a varint. whole: with its head."""

    number: int
    content: bytes
    whole: bytes


def varint(number: int) -> bytes:
    """A number from 0 up, in groups of 7 bits, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def tag(number: int, kind: int) -> bytes:
    """What a field begins with. number: of the field."""
    return varint(number << 3 | kind)


def message(number: int, content: bytes) -> bytes:
    """A field that holds bytes: a text or another message."""
    return tag(number, BYTES) + varint(len(content)) + content


def fields(content: bytes) -> Iterator[Field]:
    """The fields of a message, in their order. WireError where it is none."""
    stream = io.BytesIO(content)
    while (begin := stream.tell()) < len(content):
        number, length = read_head(stream, len(content))
        start = stream.tell()
        end = stream.seek(length, io.SEEK_CUR)
        yield Field(number, content[start:end], content[begin:end])


def read_head(file: BinaryIO, end: int) -> tuple[int, int]:
    """A field's number, and how many bytes of content follow: none of a varint, which has been read too.

    WireError if no field begins here, or it goes on beyond `end`.
    """
    head = _read_varint(file)
    number, kind = head >> 3, head & 7
    length = _FIXED.get(kind, 0)
    if kind == VARINT:
        _read_varint(file)
    elif kind == BYTES:
        length = _read_varint(file)
    elif kind not in _FIXED:
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
