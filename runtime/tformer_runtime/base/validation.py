"""Checks of option values. Each raises an OptionError that names the option."""

from __future__ import annotations

import math
import os
import reprlib
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from tformer_runtime.base.errors import OptionError, TformerError

MAX_INT = 2**31 - 1  # of any option
MAX_THREADS = 1024  # more would only wait for each other
MAX_TIMEOUT_SECONDS = 1_000_000  # about 11 days


def invalid_value(name: str, requirement: str, value: Any) -> OptionError:
    """Return the error for an option with an invalid value. requirement: a noun phrase such as "a whole number"."""
    return OptionError(f"{name} must be {requirement}, not {reprlib.repr(value)}", option=name)


def surrogate_in(text: str) -> str | None:
    """Return the words for the first lone surrogate of a text and its place; None for a text without any.

    JSON and names of files can bring one into a str. It is half of a character, and no text of any encoding holds it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} (character {error.start + 1}), which is half of a character and no text"
    return None


def named_path(path: str | bytes | os.PathLike[Any], error: type[TformerError], what: str) -> Path:
    """Return the path that a caller gives. Bytes are a name as the system has it.

    what: the words for the file. Raises `error` for a name that is empty or holds a null, TypeError for another type.
    """
    name = os.fsdecode(path)
    if not name:
        raise error(f"the path of {what} is empty: give the name of one")
    if "\0" in name:
        raise error(f"the path of {what}, {name!r}, holds a null character, which no name of a file has")
    return Path(name)


def check_bool(name: str, value: Any) -> bool:
    """Return a boolean value as bool. Raise OptionError for other types: the text "no" would be true."""
    if not isinstance(value, (bool, np.bool_)):
        raise invalid_value(name, "True or False", value)
    return bool(value)


def check_int(name: str, value: Any, minimum: int = 1, maximum: int = MAX_INT) -> int:
    """Return an integer value from `minimum` to `maximum` as int. Raise OptionError for any other value."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise invalid_value(name, f"a whole number of at least {minimum}", value)
    number = int(value)
    if number > maximum:
        raise invalid_value(name, f"a whole number of at most {maximum:,}", number)
    return number


def is_count(value: Any, maximum: int = MAX_INT) -> bool:
    """Return whether a value of a file is a whole number from 1 to `maximum`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum


def check_seconds(name: str, value: Any) -> float:
    """Return a number of seconds, from 0 to MAX_TIMEOUT_SECONDS, as float. Raise OptionError for any other value."""
    try:
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int that is larger than any float
        seconds = math.inf
    if not 0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid_value(name, f"a number of seconds from 0 to {MAX_TIMEOUT_SECONDS:,}", value)
    return seconds
