"""Random changes of bytes, of JSON documents and of protobuf messages. All are determined by the generator."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MAX_BYTES = 1 << 20  # of a case, but for a few long texts
INTERESTING_BYTES = (0, 1, 0x7F, 0x80, 0xFF)
INTERESTING_INTS = (0, 1, -1, 2, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63))
INTERESTING_INTS += (2**64, 2**64 - 1, 10**9, 10**18, 10**30, 10**400)
INTERESTING_FLOATS = (0.5, -0.0, 1e-320, 1e38, 1e39, 1e308, float("inf"), float("-inf"), float("nan"), 0.1)
INTERESTING_TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\r\n",
    "a",
    "é",
    "e\u0301",
    "\ud800",
    "\udfff",
    "\U0001f469\u200d\U0001f680",
    "\ufeff",
    "\u2028",
    "a" * 300,
    "á" * 5000,
    "None",
    "true",
    "-1",
    "1e999",
    "NaN",
    "../../x",
    "/dev/zero",
    "{{",
    "%s%n",
    "[" * 5000,
    "(" * 300,
    "a|" * 300,
    "\U0010ffff",
    "batch",
    "source",
    "float32",
    "int64",
    "bool",
)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_DEPTH = 12  # of messages that are taken apart


def mutate_bytes(data: bytes, rng: Random, words: Sequence[bytes] = ()) -> bytes:
    """Return the data with one to eight changes. words: pieces to insert, such as tags of a format."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 32, 256))
        match rng.randrange(9):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.choice(INTERESTING_BYTES)
            case 2:
                del changed[at : at + length]
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = rng.randbytes(length)
            case 5:
                changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 16))
            case 6:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(INTERESTING_INTS) % (1 << 8 * width)
                changed[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 7 if words:
                changed[at:at] = rng.choice(words)
            case _:
                source = rng.randrange(len(changed) + 1)
                changed[at : at + length] = changed[source : source + length]
    return bytes(changed[:MAX_BYTES])


def mutate_text(text: str, rng: Random, words: Sequence[str] = ()) -> str:
    """Return a text with one to four changes. words: pieces to insert."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(text) + 1), rng.choice((1, 1, 2, 5, 20))
        match rng.randrange(7):
            case 0:
                text = text[:at] + text[at + length :]
            case 1:
                text = text[:at] + text[at : at + length] * rng.choice((2, 3, 50)) + text[at + length :]
            case 2:
                text = text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) + text[at:]
            case 3 | 4 if words:
                text = text[:at] + rng.choice(words) + text[at:]
            case 5:
                source = rng.randrange(len(text) + 1)
                text = text[:at] + text[source : source + length] + text[at:]
            case _:
                text = text[:at] + rng.choice(INTERESTING_TEXTS) + text[at:]
    return text if rng.random() < 0.995 else text * (200_000 // max(1, len(text)))


def mutate_json(data: bytes, rng: Random, words: Sequence[str] = (), keys: Sequence[str] = ()) -> bytes:
    """Return a JSON document with one to four changed values, or sometimes with changed bytes.

    words: pieces to insert into texts. keys: names to add to objects.
    """
    if rng.random() < 0.03:
        return mutate_bytes(data, rng)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        document = _changed(document, rng, words, keys)
    return json.dumps(document).encode()


def _changed(document: Any, rng: Random, words: Sequence[str], keys: Sequence[str]) -> Any:
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(part, (dict, list)):
                visit(part)

    if isinstance(document, (dict, list)):
        visit(document)
    if not places:
        return _other_value(document, rng, words, [document])
    holder, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[rng.randrange(len(holder))]))
        case 1:
            holder[rng.choice((*keys, "x", "", key + "_"))] = copy.deepcopy(holder[key])
        case 2:
            other, name = rng.choice(places)
            holder[key] = (
                copy.deepcopy(other[name]) if name in other or (isinstance(other, list) and name < len(other)) else None
            )
        case 3 if keys and isinstance(holder, dict):
            holder[rng.choice(keys)] = _other_value(
                None, rng, words, [part[name] for part, name in places if _has(part, name)]
            )
        case _:
            holder[key] = _other_value(
                holder[key], rng, words, [part[name] for part, name in places if _has(part, name)]
            )
    return document


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _other_value(value: Any, rng: Random, words: Sequence[str], others: Sequence[Any]) -> Any:
    """Return a value of the same type, or of another."""
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice(INTERESTING_INTS),
        lambda: rng.randrange(-3, 40),
        lambda: rng.choice(INTERESTING_FLOATS),
        lambda: rng.choice(INTERESTING_TEXTS),
        lambda: rng.choice((None, True, False, [], {}, [[]], {"": {}})),
        lambda: [value],
        lambda: {"x": value},
        lambda: _nested(rng.choice((3, 50, 900)), rng.choice(([], {}))),
        lambda: copy.deepcopy(rng.choice(others)) if others else None,
    ]
    if isinstance(value, str):
        makers += [lambda: mutate_text(value, rng, words)] * 6
    elif isinstance(value, bool):
        makers += [lambda: not value] * 6
    elif isinstance(value, int):
        makers += [lambda: value + rng.choice((-1, 1, -value, value, 1000))] * 4 + makers[:2] * 2
    elif isinstance(value, float):
        makers += [lambda: value * rng.choice((-1.0, 1e30, 1e-30, 2.0)), makers[2]] * 2
    elif isinstance(value, list):
        makers += [lambda: value * rng.choice((2, 100)), lambda: value[::-1], lambda: value[: len(value) // 2]] * 2
    return rng.choice(makers)()


def _nested(depth: int, kind: Any) -> Any:
    value: Any = kind
    for _ in range(depth):
        value = [value] if isinstance(kind, list) else {"a": value}
    return value


Field = tuple[int, int, Any]  # number, wire type, and a number, bytes or fields


def mutate_message(data: bytes, rng: Random) -> bytes:
    """Return a protobuf message with one to four changed fields at any depth, with right lengths around them."""
    fields = parse_message(data)
    if fields is None or rng.random() < 0.05:
        return mutate_bytes(data, rng)
    lists: list[list[Field]] = []

    def visit(fields: list[Field]) -> None:
        lists.append(fields)
        for _, _, value in fields:
            if isinstance(value, list):
                visit(value)

    visit(fields)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder = rng.choice([part for part in lists if part] or [fields])
        if not holder:
            continue
        at = rng.randrange(len(holder))
        number, kind, value = holder[at]
        match rng.randrange(8):
            case 0:
                del holder[at]
            case 1:
                holder.insert(rng.randrange(len(holder) + 1), holder[at])
            case 2:
                other = rng.choice([part for part in lists if part])
                holder[at] = (number, *rng.choice(other)[1:])
            case 3:
                holder[at] = (rng.choice((number + 1, number - 1 or 1, rng.randrange(1, 30))), kind, value)
            case 4:
                rng.shuffle(holder)
            case _:
                if kind == BYTES and isinstance(value, list) and rng.random() < 0.5:
                    holder[at] = (number, kind, b"")
                elif kind == BYTES:
                    raw = write_message(value) if isinstance(value, list) else value
                    holder[at] = (number, kind, mutate_bytes(raw, rng))
                else:
                    holder[at] = (
                        number,
                        kind,
                        rng.choice((value + 1, value ^ 1, rng.choice(INTERESTING_INTS))) % 2**64,
                    )
    return write_message(fields)


def parse_message(data: bytes, depth: int = 0) -> list[Field] | None:
    """Return the fields of a message, and of the messages in it; None for bytes that are none."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if at < 0 or not 0 < number < 64:
            return None
        value: Any
        if kind == VARINT:
            value, at = _varint(data, at)
            if at < 0:
                return None
        elif kind in (FIXED32, FIXED64):
            width = 4 if kind == FIXED32 else 8
            value, at = int.from_bytes(data[at : at + width], "little"), at + width
        elif kind == BYTES:
            length, at = _varint(data, at)
            if at < 0 or at + length > len(data):
                return None
            value, at = data[at : at + length], at + length
            inner = parse_message(value, depth + 1) if value and depth < MAX_DEPTH else None
            value = value if inner is None else inner
        else:
            return None
        fields.append((number, kind, value))
    return fields if at == len(data) else None


def write_message(fields: Sequence[Field]) -> bytes:
    """Return the bytes of a message."""
    out = bytearray()
    for number, kind, value in fields:
        out += _to_varint(number << 3 | kind)
        if kind == VARINT:
            out += _to_varint(value)
        elif kind == BYTES:
            raw = write_message(value) if isinstance(value, list) else value
            out += _to_varint(len(raw)) + raw
        else:
            width = 4 if kind == FIXED32 else 8
            out += (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it; −1 as the place if there is none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return 0, -1
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return 0, -1


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
