"""Reports of signals that end the process in native code, such as SIGBUS when a mapped file was cut short.

No Python runs after such a signal. faulthandler, which is C, writes the names of the functions that each thread is in.
So a thread that runs a model is in a function whose name has that of the file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


def report_crashes() -> None:
    """Write the functions of each thread to standard error if a signal ends the process in native code.

    Does nothing if the program has chosen its own reports, or without standard error.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            faulthandler.enable(sys.stderr)


def named_frame(name: str) -> Callable[..., Any]:
    """Return a function that calls another one with its arguments, and has this name in reports and tracebacks."""
    return FunctionType(_call.__code__.replace(co_name=name, co_qualname=name), globals())


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
