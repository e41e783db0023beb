"""Places and words of the user's own code. Each message about an operation of a trace gets its words here.

A place is a line, or the module that was running. A trace has torch's own names: `aten.mean.dim` for `x.mean(1)`,
twenty operations for one call of an `nn.GRU`, and s22 for the length of an input. The user wrote none of them.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import sympy
import torch

from tformer_runtime.base.errors import error_summary

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
    """Return `file:line: code` of the innermost frame of the user's code, else of the innermost one that is not ours.

    A file below the working directory has its relative path.
    """
    frames = list(frames)
    users = [f for f in frames if is_users_file(f.filename)]
    users = users or [f for f in frames if not f.filename.startswith(OUR_PACKAGE)]
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
    users = [module for module in running if not type(module).__module__.startswith(f"{__package__.split('.')[0]}.")]
    if not users:
        return "the call of forward"
    path = {part: name for name, part in running[0].named_modules()}.get(users[-1], "")
    path = users_name(path.removeprefix("_export_root."))
    return f"`{path}` ({type(users[-1]).__name__})" if path else type(users[-1]).__name__


def users_name(name: str) -> str:
    """Return the user's name of a weight or module: without the prefixes of the modules that wrap the user's model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def line_of_error(error: BaseException) -> str:
    """Return the place in the user's code that raised the error."""
    return find_users_place(traceback.walk_tb(error.__traceback__))


# -- words ------------------------------------------------------------------------------------------------------------

LAYERS_FOLDER = os.path.join("torch", "nn", "modules", "")  # of torch's own source
_WRAPPERS = ("module.py", "container.py")  # they call the layer that is meant
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "floordiv": "//", "floor_divide": "//", "mod": "%",
    "remainder": "%", "pow": "**", "matmul": "@", "neg": "-", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|", "xor": "^", "invert": "~", "bitwise_and": "&", "bitwise_or": "|",
    "bitwise_xor": "^", "bitwise_not": "~", "logical_not": "~", "getitem": "[…]", "setitem": "[…] =", "index": "[…]",
    "select": "[…]", "slice": "[…]", "index_put": "[…] =", "copy": "[…] =",
}  # fmt: skip
_OPERATION = re.compile(r"(?:torch\.ops\.)?\b(?:aten|prims|prim|tformer)(?:\.|::)(\w+)(?:\.\w+)?")
_SYMBOL = re.compile(r"\b[szu]\d+\b")


def operation_words(target: Any, frames: Sequence[traceback.FrameSummary], called: str | None = None) -> str:
    """Return the user's words for an operation, in backquotes: a layer of torch.nn, a function or method, or a sign.

    target: the operation of the trace.
    frames: its stack, outermost first.
    called: the function of torch that was called, if it is known; `target` may be a part of it.
    """
    inner = _frames_below_user(frames)
    layers = [f for f in inner if LAYERS_FOLDER in f.filename and not f.filename.endswith(_WRAPPERS)]
    if layers and (layer := _class_at(layers[0].filename, layers[0].lineno or 0)):
        return f"`nn.{layer}`"
    name = (called or _target_name(target)).strip("_").removeprefix("native_")
    name = "to" if name == "to_copy" else name
    code = frames[-1 - len(inner)].line if len(inner) < len(frames) else ""
    sign = _SIGNS.get(name) or _SIGNS.get(name.removeprefix("r")) or _SIGNS.get(name.removeprefix("i"))
    is_called = sign is not None and re.search(rf"\b{re.escape(name)}_?\s*\(", code or "") is not None
    return f"`{name if sign is None or is_called else sign}`"


def size_words(size: sympy.Expr, names: Mapping[sympy.Symbol, str]) -> str:
    """Return a size in words. names: symbol → its word; a symbol without one follows from data."""
    text = str(size.subs({symbol: sympy.Symbol(names.get(symbol, "n")) for symbol in size.free_symbols}))
    return text.replace("Min(", "min(").replace("Max(", "max(")


def torch_error_words(error: BaseException | str) -> str:
    """Return the summary of an error of torch about a trace, with `n` for its symbols and without its namespaces."""
    text = error if isinstance(error, str) else error_summary(error)
    return _SYMBOL.sub("n", _OPERATION.sub(r"\1", text))


def _frames_below_user(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames that the innermost line of the user's code has called."""
    users = [i for i, frame in enumerate(frames) if is_users_file(frame.filename)]
    return frames[users[-1] + 1 :] if users else frames


def _target_name(target: Any) -> str:
    """Return the name of an operation without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", type(target).__name__))


def _class_at(file: str, line: int) -> str | None:
    """Return the class of torch.nn whose code holds a line: the last statement of the module that begins before it."""
    found = re.findall(r"^(?:class (\w+)|[^\s#)\]}\"'@].*)", "\n".join(_lines_of(file)[:line]), re.MULTILINE)
    return found[-1].lstrip("_") or None if found else None


@functools.lru_cache(maxsize=64)
def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:  # a torch without its source
        return []
