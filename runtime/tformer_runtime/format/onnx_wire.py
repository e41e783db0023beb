"""Protobuf's wire format, read and written by hand: https://protobuf.dev/programming-guides/encoding

A message is a sequence of fields. Each field is a tag, which holds the field's number and wire type, followed by its
content. A reader goes from field to field and skips large ones, so that no package is needed. `onnx_fields` has the
field numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

VARINT, BYTES = 0, 2  # wire types: a number; content with a length, such as a text, a message or packed numbers
MAX_VARINT_BYTES = 10
MAX_NUMBER = (1 << 29) - 1  # of a field: a tag has 32 bits, and protobuf's own readers drop any others
MAX_HEADER_BYTES = 2 * MAX_VARINT_BYTES  # of a tag, and the varint after it
_SINGLE_BYTES = [bytes([number]) for number in range(0x80)]
_FIXED_BYTES = {1: 8, 5: 4}  # wire type → bytes of a number of fixed length


class WireError(Exception):
    """The bytes are not a message, or end too early."""


class Field(Struct, frozen=True, gc=False):
    """One field of a message.

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
        if not self.content:
            return [self.varint]
        numbers, position = [], 0
        while position < len(self.content):
            number, position = read_varint(self.content, position)
            numbers.append(number)
        return numbers


def varint(number: int) -> bytes:
    """Encode a non-negative number in groups of 7 bits, the lowest group first."""
    if 0 <= number <= 0x7F:
        return _SINGLE_BYTES[number]
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
        header, following = content[begin], content[begin + 1] if begin + 1 < end else 0x80
        # Most fields are texts and messages of less than 128 bytes, and small numbers: their tag is a byte, as is what
        # follows it.
        if following < 0x80 and header & 0x87 == BYTES and header > BYTES:
            number, start, length, value = header >> 3, begin + 2, following, 0
            if start + length > end:
                raise WireError
        elif following < 0x80 and header & 0x87 == VARINT and header > VARINT:
            number, start, length, value = header >> 3, begin + 2, 0, following
        else:
            number, start, length, value = _read_header(content, begin, end)
        yield Field(number, value, content[start : start + length], content[begin : start + length])
        begin = start + length


def read_field_header(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    """Read the tag at a position. Return the field's number, and the place and number of its bytes of content.

    The value of a varint is read as well, so that its content has 0 bytes.
    data: has the tag, with the length or the varint after it, at most `MAX_HEADER_BYTES`. The content may be elsewhere.
    end: of the message that has the field.
    Raise WireError if no field begins here, or if the field extends beyond `end`.
    """
    return _read_header(data, position, end)[:3]


def _read_header(data: bytes, position: int, end: int) -> tuple[int, int, int, int]:
    """Do as `read_field_header`, and return the number of a varint as well."""
    header, position = read_varint(data, position)
    number, wire_type = header >> 3, header & 7
    value, length = 0, _FIXED_BYTES.get(wire_type, 0)
    if wire_type == VARINT:
        value, position = read_varint(data, position)
    elif wire_type == BYTES:
        length, position = read_varint(data, position)
    elif wire_type not in _FIXED_BYTES:
        raise WireError
    if not 0 < number <= MAX_NUMBER or position + length > end:
        raise WireError
    return number, position, length, value


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number that is encoded at a position, and the position after it. Raise WireError if there is none."""
    value = shift = 0
    while shift < 7 * MAX_VARINT_BYTES and position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise WireError
