"""Numbers that Python got from data, which note what Python compares them with.

`if ids[0, -1].item() == 9` takes one course for nearly all data. A test of the course needs the value at which the
other begins, and the comparison has it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from tformer_export.common.source_lines import is_users_file

MAX_ANSWERS = 4096  # results of arithmetic are tried for the values below
NEAR_FRAMES = 3  # a comprehension is a frame of its own
MAX_AT_HAND = 32  # numbers of the user's code
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


def numbers_at_hand(frame: FrameType | None) -> set[int]:
    """Return whole numbers with which the code of the user around a read may compare the number.

    They are its constants, its variables, the attributes of its objects, and the keys of its sets and dicts. Python
    does not say with which of them it compares `int(ids[0, 0])` or looks up a key.
    """
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
    numbers: dict[int, None] = {}
    for value in at_hand:
        several = [*value][:MAX_AT_HAND] if isinstance(value, (set, frozenset, dict, tuple, list)) else [value]
        numbers.update(dict.fromkeys(part for part in several if type(part) is int))
    return set([*numbers][:MAX_AT_HAND])


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
