"""Flags of `tformer-run`: their names, and how their text is parsed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from tformer_runtime.base.errors import OptionError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Flag(Struct, frozen=True):
    """A flag of the command line.

    flag: its name, such as "--top-k".
    metavar: the name of its value in --help; empty for a switch.
    help: one sentence.
    read: from its text to its value; from the list of texts, if `repeated`. Raises ValueError for text without a value.
    repeated: whether the flag may be repeated.
    """

    flag: str
    metavar: str
    help: str
    read: Callable[[Any], Any]
    repeated: bool = False

    @property
    def switch(self) -> bool:
        return not self.metavar


def switch(flag: str, help: str) -> Flag:
    """Return a flag without a value."""
    return Flag(flag, "", help, bool)


def value_of(flag: Flag, text: Any) -> Any:
    """Return the value of a flag.

    text: its text, or its texts if it may be repeated. Text without a value is returned unchanged, so that the check of
    the option refuses it.
    """
    try:
        return flag.read(text)
    except ValueError:
        return text if isinstance(text, str) else " ".join(text)


def bytes_of(text: str, option: str = "max_memory") -> int:
    """Parse a number of bytes, KiB (K), MiB (M) or GiB (G). Raise OptionError for other text. option: its name."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    count = int(size) if math.isfinite(size) else 0
    if count < 1:
        raise OptionError(
            f"{option} must be a number of bytes of at least 1, or such a number and K, M or G, not {text!r}",
            option=option,
        )
    return count


MAX_MEMORY = "max_memory"
RUN_HEADING = "Run"  # of flags
MAX_MEMORY_FLAG = {
    MAX_MEMORY: Flag("--max-memory", "SIZE", "Limit the memory of the caches, in bytes, such as 500M or 2G.", bytes_of)
}
