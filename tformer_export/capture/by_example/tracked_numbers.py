"""Numbers that Python got from data, which note what Python compares them with.

`if ids[0, -1].item() == 9` takes one path for nearly all data. A test of the path needs the value at which the
other begins, and the comparison has it. A text that Python makes of the number is compared with texts of the code.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from tformer_export.common.source_lines import is_users_file

MAX_ANSWERS = 4096  # results of arithmetic are tried for the values below
NEAR_FRAMES = 3  # a comprehension is a frame of its own
MAX_AT_HAND = 32  # numbers of the user's code, and as many in its texts
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|\d+")
_SHOWN = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")  # a number as Python shows it
MAX_CHARACTERS = 8  # of a text or bytes that may be compared with chr(number) or bytes(numbers)
_Function = Callable[[Any], Any]


class Asked:
    """What Python asked of one number: values of it at which an answer changes."""

    def __init__(self) -> None:
        self.values: set[Any] = set()


def track(value: Any, asked: Asked) -> Any:
    """Return a number that notes its comparisons. bool has no subclasses and is returned itself."""
    return _derived(value, asked, lambda number: number)


def plain(value: Any) -> Any:
    """Return the number itself, without notes."""
    return int(value) if isinstance(value, TrackedInt) else float(value) if isinstance(value, TrackedFloat) else value


def _derived(value: Any, asked: Asked, function: _Function) -> Any:
    kind = {int: TrackedInt, float: TrackedFloat}.get(type(value))
    if kind is None:
        return value
    number = kind(value)
    number.asked, number.function = asked, function
    return number


def _note_comparison(number: Any, compare: Callable[[Any, Any], bool], other: Any) -> None:
    """Note values of the read number for which the comparison has another answer, and the value itself."""
    answer = compare(plain(number), other)
    near: Iterable[Any] = (other, other + 1, other - 1)
    for values in (near, range(MAX_ANSWERS)):
        for value in values:
            try:
                if compare(plain(number.function(value)), other) != answer:
                    number.asked.values.add(value)
                    return
            except (ArithmeticError, ValueError):
                continue


def _note_text(number: Any, show: Callable[[Any], str], frame: FrameType | None) -> str:
    """Return the text of a number, and note values of the read number whose text the code at hand has."""
    kind, texts = type(plain(number)), {text for text in _at_hand(frame) if isinstance(text, str)}
    missing = texts | {part for text in texts for part in _SHOWN.findall(text)}
    missing.discard(show(plain(number)))
    for value in (*_as_numbers(missing), *range(MAX_ANSWERS)):
        if not missing:
            break
        try:
            text = show(kind(plain(number.function(value))))
        except (ArithmeticError, ValueError):
            continue
        if text in missing:
            number.asked.values.add(value)
            missing.discard(text)
    return show(plain(number))


def _as_numbers(texts: Iterable[str]) -> list[float]:
    return [float(text) for text in texts if _SHOWN.fullmatch(text)]


def numbers_at_hand(frame: FrameType | None) -> set[int]:
    """Return whole numbers with which the code of the user around a read may compare the number.

    They are its constants, its variables, the attributes of its objects, and the keys of its sets and dicts, and the
    numbers and single characters in those of them that are texts. Python does not say with which of them it compares
    `int(ids[0, 0])`, looks up a key, or compares `hex(number)`.
    """
    at_hand = _at_hand(frame)
    numbers = dict.fromkeys(part for part in at_hand if type(part) is int)
    in_texts: dict[int, None] = {}
    for part in at_hand:
        if isinstance(part, str):
            in_texts.update(dict.fromkeys(_parsed(text) for text in _NUMBER.findall(part)))
        if isinstance(part, (str, bytes)) and len(part) <= MAX_CHARACTERS:
            in_texts.update(dict.fromkeys(part if isinstance(part, bytes) else map(ord, part)))
    return {*[*numbers][:MAX_AT_HAND], *[*in_texts][:MAX_AT_HAND]}


def _parsed(text: str) -> int:
    return int(text, 0) if text[:2].lower() in ("0x", "0b", "0o") else int(text)


def _at_hand(frame: FrameType | None) -> list[Any]:
    """Return the values of the user's code around a frame, with the first entries of its collections one by one."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < NEAR_FRAMES:
        if is_users_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    at_hand: list[Any] = []
    for near in frames:
        at_hand += near.f_code.co_consts
    for near in frames:
        at_hand += near.f_locals.values()
        at_hand += [near.f_globals.get(name) for name in near.f_code.co_names]
        at_hand += [value for owner in near.f_locals.values() for value in getattr(owner, "__dict__", {}).values()]
    collections = (set, frozenset, dict, tuple, list)
    return [
        part
        for value in at_hand
        for part in ([*value][:MAX_AT_HAND] if isinstance(value, collections) else [value])
        if isinstance(part, (int, str, bytes))
    ]


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, (int, float)):
            _note_comparison(self, compare, plain(other))
            return compare(plain(self), plain(other))
        return NotImplemented

    return method


def _arithmetic(name: str, reflected: bool) -> Callable[..., Any]:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        number, before = plain(other), self.function

        def function(value: Any) -> Any:
            value = before(value)
            return compute(number, value) if reflected else compute(value, number)

        value = compute(number, plain(self)) if reflected else compute(plain(self), number)
        return _derived(value, self.asked, function)

    return method


class _Tracked:
    asked: Asked
    function: _Function

    def __hash__(self) -> int:
        return hash(plain(self))

    def __bool__(self) -> bool:
        _note_comparison(self, operator.ne, 0)
        return bool(plain(self))

    def __str__(self) -> str:
        return _note_text(self, str, sys._getframe(1))

    def __repr__(self) -> str:
        return _note_text(self, repr, sys._getframe(1))

    def __format__(self, form: str) -> str:
        return _note_text(self, lambda value: format(value, form), sys._getframe(1))

    def __reduce__(self) -> Any:  # a copy is a plain number
        return type(plain(self)), (plain(self),)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Tracked, f"__{_name}__", _comparison(_name))
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(_Tracked, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(_Tracked, f"__r{_name}__", _arithmetic(_name, reflected=True))


class TrackedInt(_Tracked, int):
    """An int that Python got from data."""


class TrackedFloat(_Tracked, float):
    """A float that Python got from data."""
