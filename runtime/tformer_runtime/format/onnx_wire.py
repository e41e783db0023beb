"""Protobuf's wire format, read and written by hand: https://protobuf.dev/programming-guides/encoding

A message is a sequence of fields. Each field is a tag, which holds the field's number and wire type, followed by its
content. A reader goes from field to field and skips large ones, so that no package is needed. `onnx_fields` has the
field numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, BYTES = 0, 2  # wire types: a number; content with a length, such as a text, a message or packed numbers
MAX_VARINT_BYTES = 10
MAX_HEADER_BYTES = 2 * MAX_VARINT_BYTES  # of a tag, and the varint after it
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
    begin, end = 0, len(content)
    while begin < end:
        number, start, length = read_field_header(content, begin, end)
        yield Field(number, content[start : start + length], content[begin : start + length])
        begin = start + length


def read_field_header(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    """Read the tag at a position. Return the field's number, and the place and number of its bytes of content.

    The value of a varint is read as well, so that its content has 0 bytes.
    data: has the tag, with the length or the varint after it, at most `MAX_HEADER_BYTES`. The content may be elsewhere.
    end: of the message that has the field.
    Raise WireError if no field begins here, or if the field extends beyond `end`.
    """
    header, position = read_varint(data, position)
    number, wire_type = header >> 3, header & 7
    length = _FIXED_BYTES.get(wire_type, 0)
    if wire_type == VARINT:
        _, position = read_varint(data, position)
    elif wire_type == BYTES:
        length, position = read_varint(data, position)
    elif wire_type not in _FIXED_BYTES:
        raise WireError
    if number == 0 or position + length > end:
        raise WireError
    return number, position, length


def varint_of(field: Field) -> int:
    """Return the number of a field that is a varint. Raise WireError if it is none."""
    header, position = read_varint(field.encoded, 0)
    if header & 7 != VARINT:
        raise WireError
    return read_varint(field.encoded, position)[0]


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number that is encoded at a position, and the position after it. Raise WireError if there is none."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        if position >= len(data):
            raise WireError
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError
