"""What a value that was asked for must be."""

from __future__ import annotations

import reprlib
from numbers import Integral
from typing import Any

import numpy as np

from tformer_runtime.errors import OptionError


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
