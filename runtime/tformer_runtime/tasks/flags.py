"""Options as `tformer-run` takes them: what they are called, and what their text stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
