"""What is read off a node of a traced graph: its operation, its line in the user's code, its sizes."""

from __future__ import annotations

import functools
import itertools
import os
import traceback
from operator import getitem
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, Max, Min

from tformer_export.common.source_lines import is_users, own_name, users_line

aten = torch.ops.aten
FEW, MANY = 17, 2**20  # sizes at which expressions are looked at

_LAYERS = os.path.join("torch", "nn", "modules", "")


def operation(node: Node) -> str:
    """The operation's name; of a part of its results, that of the operation."""
    while node.target is getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return "the attention" if str(node.target) == "tformer.attention.default" else f"`{node.target}`"


def named(node: Node) -> str:
    """The operation and its line in the user's code."""
    return f"{operation(node)} at {source_line(node)}"


def source_line(node: Node) -> str:
    """Where the user's code made this node: `file:line: code`, of their innermost frame, and in which of torch.nn's
    modules if that line calls one that is made of others; without a frame of theirs, the module alone."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = []
    for at, line in enumerate(lines):
        if line.strip().startswith("File "):
            code = lines[at + 1].strip() if at + 1 < len(lines) else ""
            number = int(line.split("line ")[-1].split(",")[0])
            frames.append(traceback.FrameSummary(line.split('"')[1], number, "", line=code))
    inner = list(itertools.takewhile(lambda f: not is_users(f.filename), reversed(frames)))
    layers = {f.filename for f in inner if _LAYERS in f.filename and not f.filename.endswith("module.py")}
    path = next(reversed([name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]), "")
    path = own_name(path.replace("L['self'].", ""))
    if len(inner) == len(frames):
        return f"`{path}`" if path else users_line(frames)
    return users_line(frames) + (f" (in its `{path}`)" if len(layers) > 1 and path else "")


def arguments(node: Node) -> list[Any]:
    """The node's positional arguments; torch.fx types them as a union of all that there may be."""
    return list(node.args)


def meta(node: Any) -> Any:
    """The traced value of a node: a fake tensor, a SymInt, or a list of them."""
    return node.meta.get("val") if isinstance(node, Node) else node


def expression(size: Any) -> sympy.Expr:
    """A size as an expression of the trace's symbols; one that is always a symbol's own value is that symbol."""
    return plain(size.node.expr)[0] if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def symbols(size: Any) -> frozenset[sympy.Symbol]:
    return frozenset(expression(size).free_symbols) if isinstance(size, torch.SymInt) else frozenset()


@functools.lru_cache(maxsize=4096)
def plain(expr: sympy.Expr) -> tuple[sympy.Expr, int | None]:
    """An expression of one symbol, such as 96 − max(0, 96 − n), as n or as a number, where it is that for n = 1, 2 …,
    and the greatest n for which it is, where there is one."""
    if expr.is_Symbol or len(expr.free_symbols) != 1 or not expr.has(Max, Min, CeilToInt, FloatTrueDiv):
        return expr, None
    (symbol,) = expr.free_symbols

    def at(n: int) -> int:
        return int(expr.subs(symbol, n))

    for same in (symbol, sympy.Integer(at(1))):
        if all(at(n) == same.subs(symbol, n) for n in range(1, FEW)):
            low, high = FEW - 1, MANY
            if at(high) == same.subs(symbol, high):
                return same, None
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle) == same.subs(symbol, middle) else (low, middle)
            return same, low
    return expr, None


def is_counted(node: Any) -> bool:
    """Whether a node is a number that was read out of data, such as how many rows an expert gets, and not out of the
    shape of an input."""
    value = meta(node)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and any(free_unbacked_symbols(value))
