"""Places in the user's own code: a line, or the module that was running."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import numpy as np
import sympy
import torch

OUR_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_NOT_THE_USERS = (
    OUR_PACKAGE,
    *(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, np, sympy)),
    str(Path(os.__file__).parent / "contextlib.py"),
    str(Path(os.__file__).parent / "functools.py"),
    "<",
)


def is_users_file(file: str) -> bool:
    """Return whether a file belongs to the user and not to PyTorch, numpy, einops or this package."""
    return not file.startswith(_NOT_THE_USERS) and f"{os.sep}einops{os.sep}" not in file


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return `file:line: code` of the innermost frame of the user's code, else of the innermost frame.

    A file below the working directory has its relative path.
    """
    frames = list(frames)
    users = [f for f in frames if is_users_file(f.filename)] or frames
    if not users:
        return "(no source line in the trace)"
    file = users[-1].filename.removeprefix(os.getcwd() + os.sep)
    return f"{file}:{users[-1].lineno}: {(users[-1].line or '').strip()}"


def find_users_place(walked: Iterable[tuple[FrameType, int]], or_innermost: bool = True) -> str:
    """Return the user's innermost line among frames, which come outermost first.

    For a model without a line of the user's code, return the innermost module that was running.

    or_innermost: whether to return the innermost line if no module was running either, or "".
    """
    walked = list(walked)
    summary = traceback.StackSummary.extract(iter(walked))
    if any(is_users_file(f.filename) for f in summary):
        return users_line(summary)
    running = [m for frame, _ in walked if isinstance(m := frame.f_locals.get("self"), torch.nn.Module)]
    if not running:
        return users_line(summary) if or_innermost else ""
    path = {part: name for name, part in running[0].named_modules()}.get(running[-1], "")
    path = users_name(path.removeprefix("_export_root."))
    return f"`{path}` ({type(running[-1]).__name__})" if path else type(running[-1]).__name__


def users_name(name: str) -> str:
    """Return the user's name of a weight or module: without the prefixes of the modules that wrap the user's model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def line_of_error(error: BaseException) -> str:
    """Return the place in the user's code that raised the error."""
    return find_users_place(traceback.walk_tb(error.__traceback__))
