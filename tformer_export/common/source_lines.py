"""Where in the user's own code something happened: a line, or a module that was running."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import numpy as np
import torch

OUR_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_NOT_THE_USERS = (
    OUR_PACKAGE,
    *(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, np)),
    str(Path(os.__file__).parent / "contextlib.py"),
    str(Path(os.__file__).parent / "functools.py"),
    "<",
)
LONGEST_QUOTE = 200  # characters of another's error that are repeated


def is_users(file: str) -> bool:
    """Whether a file is neither PyTorch's, numpy's nor ours."""
    return not file.startswith(_NOT_THE_USERS) and f"{os.sep}einops{os.sep}" not in file


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line: code` of the innermost frame of the user's, or, if there is none, of the innermost."""
    frames = list(frames)
    own = [f for f in frames if is_users(f.filename)] or frames
    if not own:
        return "(no source line in the trace)"
    return f"{own[-1].filename}:{own[-1].lineno}: {(own[-1].line or '').strip()}"


def place(walked: Iterable[tuple[FrameType, int]]) -> str:
    """The user's innermost line among frames that are given outermost first; for a model that has no line of theirs,
    the innermost module that was running."""
    walked = list(walked)
    summary = traceback.StackSummary.extract(iter(walked))
    if any(is_users(f.filename) for f in summary):
        return users_line(summary)
    running = [m for frame, _ in walked if isinstance(m := frame.f_locals.get("self"), torch.nn.Module)]
    if not running:
        return users_line(summary)
    path = {part: name for name, part in running[0].named_modules()}.get(running[-1], "")
    path = own_name(path.removeprefix("_export_root."))
    return f"`{path}` ({type(running[-1]).__name__})" if path else type(running[-1]).__name__


def own_name(name: str) -> str:
    """A weight's or module's name without the names of what we wrapped the model in."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def line_of_error(error: BaseException) -> str:
    """Where the user's code was when the error arose."""
    return place(traceback.walk_tb(error.__traceback__))


def said(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    text = next((row.strip() for row in str(error).splitlines() if row.strip()), "")
    text = text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
