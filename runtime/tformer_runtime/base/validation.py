"""Checks of option values. Each raises an OptionError that names the option."""

from __future__ import annotations

import reprlib
from numbers import Integral, Real
from typing import Any

import numpy as np

from tformer_runtime.base.errors import OptionError

MAX_INT = 2**31 - 1  # of any option
MAX_THREADS = 1024  # more would only wait for each other
MAX_TIMEOUT_SECONDS = 1_000_000  # about 11 days


def invalid_value(name: str, requirement: str, value: Any) -> OptionError:
    """Return the error for an option with an invalid value. requirement: a noun phrase such as "a whole number"."""
    return OptionError(f"{name} must be {requirement}, not {reprlib.repr(value)}", option=name)


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


def check_seconds(name: str, value: Any) -> float:
    """Return a number of seconds, from 0 to MAX_TIMEOUT_SECONDS, as float. Raise OptionError for any other value."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= MAX_TIMEOUT_SECONDS:
        raise invalid_value(name, f"a number of seconds from 0 to {MAX_TIMEOUT_SECONDS:,}", value)
    return float(value)
