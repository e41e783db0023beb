"""Options as `tformer-run` takes them: what they are called, and what their text stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tformer_runtime.base.errors import OptionError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Flag:
    """read: the value of a text, or of all texts of an option that may be repeated; ValueError if there is none.
    A switch has no text: it is given or not."""

    flag: str
    metavar: str
    help: str
    read: Callable[[Any], Any]
    repeated: bool = False

    @property
    def switch(self) -> bool:
        return not self.metavar


def switch(flag: str, help: str) -> Flag:
    """An option that is given or not."""
    return Flag(flag, "", help, bool)


def value_of(flag: Flag, given: Any) -> Any:
    """What was given, as the value that it stands for; as it is where it stands for none, to be refused later."""
    try:
        return flag.read(given)
    except ValueError:
        return given if isinstance(given, str) else " ".join(given)


def bytes_of(text: str) -> int:
    """Of a number of bytes, or of KiB, MiB or GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    count = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if count < 1:
        raise OptionError(
            f"max_memory must be a number of bytes of at least 1, or such a number and K, M or G, not {text!r}"
        )
    return count


MAX_MEMORY = "max_memory"
HOW = "How it is generated"  # heading
LIMIT = {MAX_MEMORY: Flag("--max-memory", "SIZE", "Bytes that caches may take, such as 500M or 2G.", bytes_of)}
