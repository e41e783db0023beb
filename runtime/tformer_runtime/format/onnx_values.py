"""The fields of a protobuf message with the values of its numbers: `onnx_wire` for messages that are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tformer_runtime.format.onnx_wire import BYTES, VARINT, WireError

FIXED_BYTES = {1: 8, 5: 4}  # wire type → bytes of a number of fixed length


class Value(NamedTuple):
    """One field of a message, with its number if it is one.

    number: the field number.
    varint: the unsigned number of a varint; 0 for other fields.
    content: the bytes of the content; empty for a varint.
    encoded: all bytes of the field, with its tag.
    """

    number: int
    varint: int
    content: bytes
    encoded: bytes

    @property
    def signed(self) -> int:
        """The number of a varint as an int64."""
        return self.varint - (1 << 64) if self.varint >> 63 else self.varint

    def varints(self) -> list[int]:
        """Return the numbers of a repeated field: one, or several that are packed."""
        numbers, position = [], 0
        while position < len(self.content):
            number, position = _varint_at(self.content, position)
            numbers.append(number)
        return numbers if self.content else [self.varint]


def iter_values(content: bytes) -> Iterator[Value]:
    """Yield the fields of a message as `iter_fields`, with the values of varints, and several times as fast.

    Raise WireError if the bytes are not a message.
    """
    position, end = 0, len(content)
    while position < end:
        begin = position
        header, position = _varint_at(content, position)
        number, wire_type = header >> 3, header & 7
        value, length = 0, FIXED_BYTES.get(wire_type, 0)
        if wire_type == VARINT:
            value, position = _varint_at(content, position)
        elif wire_type == BYTES:
            length, position = _varint_at(content, position)
        elif wire_type not in FIXED_BYTES:
            raise WireError
        start, position = position, position + length
        if number == 0 or position > end:
            raise WireError
        yield Value(number, value, content[start:position], content[begin:position])


def _varint_at(content: bytes, position: int) -> tuple[int, int]:
    """Return the varint that begins at a position, and the position behind it."""
    value = shift = 0
    while shift < 70 and position < len(content):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise WireError
