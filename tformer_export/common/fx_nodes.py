"""Facts that a node of a traced graph holds: its operation, its line in the user's code, its sizes."""

from __future__ import annotations

import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, Max, Min
from torch.utils._sympy.printers import PythonPrinter

from tformer_export.common.source_lines import LAYERS_FOLDER, is_users_file, operation_words, users_line, users_name

aten = torch.ops.aten
ORIGIN = ("stack_trace", "nn_module_stack", "torch_fn")  # entries of a node's meta that say where it comes from
DENSE_SIZES, MAX_SIZE = 17, 2**20  # expressions of sizes are evaluated at all sizes below the first, and at the other


def operation_name(node: Node) -> str:
    """Return the user's words for the operation. One of several results of an operation has the words of that."""
    while node.target is getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    if str(node.target) == "tformer.attention.default":
        return "the attention"
    called = node.meta.get("torch_fn", ("", ""))[1]  # such as "method_descriptor.mean", and "OpOverload.mean.dim"
    is_known = isinstance(node.target, torch._ops.OpOverload) and called and not called.startswith("OpOverload")
    frames = _frames(node.meta.get("stack_trace"))
    return operation_words(node.target, frames, called.split(".")[-1] if is_known else None)


def origin(node: Node) -> dict[str, Any]:
    """Return the entries of a node's meta from which messages name it; a node in its place gets them."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def describe_node(node: Node) -> str:
    """Return the operation and its line in the user's code."""
    return f"{operation_name(node)} at {source_line(node)}"


def source_line(node: Node) -> str:
    """Return the line of the user's code that made this node, as `file:line: code` of the innermost frame.

    It names the module of torch.nn as well if the line calls one that consists of others. Without a frame of the
    user's code, it is the module alone.
    """
    frames = _frames(node.meta.get("stack_trace"))
    inner = list(itertools.takewhile(lambda f: not is_users_file(f.filename), reversed(frames)))
    layers = {f.filename for f in inner if LAYERS_FOLDER in f.filename and not f.filename.endswith("module.py")}
    path = next(reversed([name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]), "")
    path = users_name(path.replace("L['self'].", ""))
    if len(inner) == len(frames):
        return f"`{path}`" if path else users_line(frames)
    return users_line(frames) + (f" (in its `{path}`)" if len(layers) > 1 and path else "")


def line_of_trace(stack_trace: str | None) -> str:
    """Return the line of the user's code in a stack as torch.fx stores it; an empty string if there is none."""
    frames = _frames(stack_trace)
    return users_line(frames) if any(is_users_file(frame.filename) for frame in frames) else ""


def _frames(stack_trace: str | None) -> list[traceback.FrameSummary]:
    lines = (stack_trace or "").splitlines()
    frames = []
    for at, line in enumerate(lines):
        if line.strip().startswith("File "):
            code = lines[at + 1].strip() if at + 1 < len(lines) else ""
            number = int(line.split("line ")[-1].split(",")[0])
            frames.append(traceback.FrameSummary(line.split('"')[1], number, "", line=code))
    return frames


def arguments(node: Node) -> list[Any]:
    """Return the node's positional arguments as Any; torch.fx types them as a union of all possible types."""
    return list(node.args)


def meta(node: Any) -> Any:
    """Return the traced value of a node, a fake tensor, a SymInt or a list of them; any other argument unchanged."""
    return node.meta.get("val") if isinstance(node, Node) else node


def expression(size: Any) -> sympy.Expr:
    """Return a size as an expression of the trace's symbols; one that always equals a symbol is that symbol."""
    return simplify_size(size.node.expr)[0] if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def is_sized_by_data(target: Any, index_types: Iterable[Any] = ()) -> bool:
    """Return whether the size of an operation's results follows from data, as that of `nonzero` and of `x[mask]`.

    index_types: the dtypes of its indices, if it is an index.
    """
    if target in (aten.where.default, aten.nonzero_numpy.default):  # torch does not say so of these
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
        return False
    return target is not aten.index.Tensor or not {torch.bool, torch.uint8}.isdisjoint(index_types)


def as_function(expr: sympy.Basic, symbol: sympy.Symbol) -> Callable[[int], Any]:
    """Return an expression of one symbol as Python code: 100,000 values take less than a second, by sympy a minute."""
    code = f"lambda {symbol}: {PythonPrinter().doprint(expr)}"
    function: Callable[[int], Any] = eval(code, {"math": math, "torch": torch})
    return function


def symbols(size: Any) -> frozenset[sympy.Symbol]:
    """Return the symbols of the trace on which a size depends."""
    return frozenset(expression(size).free_symbols) if isinstance(size, torch.SymInt) else frozenset()


@functools.lru_cache(maxsize=4096)
def simplify_size(expr: sympy.Expr) -> tuple[sympy.Expr, int | None]:
    """Simplify an expression of one symbol n, such as 96 − max(0, 96 − n), to n, n plus a number, or a number.

    Return the result with the greatest n up to which the two are equal; None for no limit. An expression that equals
    neither for small n is returned unchanged.
    """
    if expr.is_Symbol or len(expr.free_symbols) != 1 or not expr.has(Max, Min, CeilToInt, FloatTrueDiv):
        return expr, None
    (symbol,) = expr.free_symbols

    def at(n: int) -> int:
        return int(expr.subs(symbol, n))

    for same in (symbol + (at(1) - 1), sympy.Integer(at(1))):
        if all(at(n) == same.subs(symbol, n) for n in range(1, DENSE_SIZES)):
            low, high = DENSE_SIZES - 1, MAX_SIZE
            if at(high) == same.subs(symbol, high):
                return same, None
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle) == same.subs(symbol, middle) else (low, middle)
            return same, low
    return expr, None


def is_read_from_data(node: Any) -> bool:
    """Return whether a node is a number that was read from data and not from the shape of an input.

    The number of rows that an expert gets is one.
    """
    value = meta(node)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and any(free_unbacked_symbols(value))
