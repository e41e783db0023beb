"""Checks of single generation options, and the parsers of their text on the command line.

A check takes an option's name and value and returns the value in the form that `Settings` keeps: tuples for lists, JSON
text for a JSON schema. The annotation of this form is the type of the setting. A check raises OptionError, with the
option's name, for an impossible value. A parser turns the text of a command-line option into a value. It raises
ValueError for text without a value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import OptionError
from tformer_runtime.base.validation import MAX_INT, check_int, invalid_value, surrogate_in

if TYPE_CHECKING:
    from tformer_runtime.engine.engine import Engine

Check = Callable[[str, Any], Any]
EarlyStopping = bool | Literal["never"]
LogitsProcessor = Callable[[Ints, F32], npt.ArrayLike]


@runtime_checkable
class HasEngine(Protocol):
    """A model that drafts tokens for another model, such as a `Model`."""

    @property
    def engine(self) -> Engine: ...


class WholeNumber(Struct, frozen=True):
    """A check for a whole number within bounds."""

    minimum: int
    maximum: int = MAX_INT

    def __call__(self, name: str, value: Any) -> int:
        return check_int(name, value, self.minimum, self.maximum)


class Number(Struct, frozen=True, kw_only=True):
    """A check for a finite number within bounds.

    allowed: the allowed numbers, for the error.
    above: the number must be greater.
    or_zero: whether 0 is allowed, whatever the bounds.
    """

    allowed: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    or_zero: bool = False

    def __call__(self, name: str, value: Any) -> float:
        if not (_is_finite(value) and self._allows(value)):
            raise invalid_value(name, self.allowed, value)
        return float(value)

    def _allows(self, value: float) -> bool:
        return (self.or_zero and value == 0) or (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid_value(name, "True or False", value)
    return value


def early_stopping(name: str, value: Any) -> EarlyStopping:
    if isinstance(value, bool):
        return value
    if value != "never":
        raise invalid_value(name, 'True, False or "never"', value)
    return "never"


def text(name: str, value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise invalid_value(name, "a string that is not empty", value)
    return _whole_characters(name, value)


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    return _strings(name, (value,) if isinstance(value, str) else value)


def choices(name: str, value: Any) -> tuple[str, ...]:
    strings = _strings(name, value)
    if not strings:
        raise OptionError(f"{name} must be one string or more, not none", option=name)
    return strings


def token_id(name: str, value: Any) -> int:
    if not _is_id(value):
        raise invalid_value(name, "a token id, a whole number of at least 0", value)
    return int(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(value)
    if items is None or not all(map(_is_id, items)):
        raise invalid_value(name, "a sequence of token ids", value)
    return tuple(map(int, items))


def prefix(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _whole_characters(name, value) or ()
    if _items(value) is None:
        raise invalid_value(name, "text or a sequence of token ids", value)
    return token_ids(name, value)


def token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    sequences = [_items(item) for item in _items(value) or ()]
    if _items(value) is None or not all(items and all(map(_is_id, items)) for items in sequences):
        raise invalid_value(name, "a sequence of sequences of token ids, none of them empty", value)
    return tuple(tuple(map(int, items or ())) for items in sequences)


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of id and number, sorted by id, from a mapping or from pairs. Ids from JSON are strings."""
    items = _items(value.items() if isinstance(value, Mapping) else value)
    pairs = [_id_and_number(item) for item in items or ()]
    bias = dict(pair for pair in pairs if pair)
    if items is None or len(bias) != len(pairs):
        raise invalid_value(name, "a mapping from token ids to numbers, each id once", value)
    return tuple(sorted(bias.items()))


def json_schema(name: str, value: Any) -> str:
    """Return the schema as JSON text. Keep the order of its properties, which generated JSON follows."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        as_text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise OptionError(f"{name} is nested too deeply", option=name) from error
    except (TypeError, ValueError):
        schema = None
    if not isinstance(schema, Mapping):
        raise invalid_value(name, "a JSON schema, as JSON or as a dict", value)
    return _whole_characters(name, as_text)


def logits_processor(name: str, value: Any) -> LogitsProcessor:
    if not callable(value):
        raise invalid_value(name, "a callable", value)
    processor: LogitsProcessor = value
    return processor


def draft_model(name: str, value: Any) -> HasEngine:
    if not isinstance(value, HasEngine):
        raise invalid_value(name, "a Model", value)
    return value


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int that is larger than any float
        return False


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _id_and_number(value: Any) -> tuple[int, float] | None:
    key, weight = items if len(items := _items(value) or ()) == 2 else (None, None)
    if isinstance(key, str) and key.isdecimal():
        key = int(key)
    return (int(key), float(weight)) if _is_id(key) and _is_finite(weight) else None


def _items(value: Any) -> tuple[Any, ...] | None:
    """Return the items of a list, a tuple, a set or an array; None for any other value."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # an array without axes
        return None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise invalid_value(name, "strings that are not empty", value)
    return tuple(_whole_characters(name, item) for item in items)


def _whole_characters(name: str, text: str) -> str:
    if (found := surrogate_in(text)) is not None:
        raise OptionError(f"{name} holds {found}", option=name)
    return text


# Parsers of the command line


def parse_early_stopping(argument: str) -> bool | str:
    return {"true": True, "false": False}.get(argument.lower(), argument)


def parse_ids(argument: str) -> list[int]:
    return [int(word) for word in argument.split(",")]


def parse_all_ids(arguments: tuple[str, ...]) -> list[int]:
    return parse_ids(",".join(arguments))


def parse_sequences(arguments: tuple[str, ...]) -> list[list[int]]:
    return [parse_ids(argument) for argument in arguments]


def parse_biases(arguments: tuple[str, ...]) -> list[tuple[int, float]]:
    pairs = [argument.split("=") for argument in arguments]
    return [(int(id), float(bias)) for id, bias in pairs]


def parse_text_or_file(argument: str) -> str:
    """Return the argument, or for @FILE the content of the file. Raise OptionError if the file cannot be read."""
    if not argument.startswith("@"):
        return argument
    try:
        return Path(argument[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{argument[1:]!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{argument[1:]!r} is not UTF-8") from error
