"""What a value that was asked for must be."""

from __future__ import annotations

import reprlib
from numbers import Integral, Real
from typing import Any

import numpy as np

from tformer_runtime.base.errors import OptionError

LONGEST = 1_000_000  # seconds, 11 days


def refused(name: str, what: str, value: Any) -> OptionError:
    return OptionError(f"{name} must be {what}, not {reprlib.repr(value)}")


def flag(name: str, value: Any) -> bool:
    """The value as True or False. OptionError, which names the option, for any other: "no" would be true."""
    if not isinstance(value, (bool, np.bool_)):
        raise refused(name, "True or False", value)
    return bool(value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """The value as a whole number of at least so many. OptionError, which names the option, for any other."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refused(name, f"a whole number of at least {least}", value)
    return int(value)


def seconds(name: str, value: Any) -> float:
    """The value as a number of seconds, up to LONGEST. OptionError, which names the option, for any other."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= LONGEST:
        raise refused(name, f"a number of seconds from 0 to {LONGEST:,}", value)
    return float(value)
