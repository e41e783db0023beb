"""Axes of outputs that a model makes of an input's: how long they are where that is n long.

Convolutions without padding make (n - k) // s + 1 of n positions, and one after the other the same with other numbers.
An expression of another kind is left alone: then nobody can tell a row's own positions from its padding, and rows of
one length alone may be run together, or their results are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy
import torch

from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import MANY, expression, meta
from tformer_export.staging.emitter import axis_names
from tformer_runtime.format.manifest import Follows

STEPS = 24  # of an axis, at both ends of which the expression is looked at


def followers(captured: Captured, outputs: Iterable[torch.Tensor]) -> dict[str, Follows]:
    """By the names that the axes have in the file. Cost: some hundred evaluations of each expression."""
    owners = {
        expression(size): name
        for node in captured.inputs.values()
        for size, name in zip(meta(node).shape, axis_names(captured, meta(node)), strict=True)
        if isinstance(size, torch.SymInt) and isinstance(name, str)
    }
    found = {}
    for value in outputs:
        for size, name in zip(value.shape, axis_names(captured, value), strict=True):
            made = expression(size)
            if not isinstance(name, str) or made in owners or len(made.free_symbols) != 1:
                continue
            (symbol,) = made.free_symbols
            numbers = _numbers(made, symbol) if symbol in owners else None
            if numbers is not None:
                found[name] = Follows(owners[symbol], *numbers)
    return found


def _numbers(made: sympy.Expr, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """least and stride of an expression that is (n - least) // stride + 1 of the symbol; None if it is none."""

    def at(n: int) -> int:
        return int(made.subs(symbol, n))

    least = _first(lambda n: at(n) >= 1)
    second = _first(lambda n: at(n) >= 2)
    if least is None or second is None or second <= least:
        return None
    stride = second - least
    steps = [*range(1, STEPS), MANY // stride]
    edges = [least + k * stride for k in steps]
    if all(at(edge) == k + 1 and at(edge - 1) == k for k, edge in zip(steps, edges, strict=True)):
        return least, stride
    return None


def _first(holds: Callable[[int], bool]) -> int | None:
    """The least number from 1 on for which something holds that does not cease to."""
    if not holds(MANY):
        return None
    low, high = 0, MANY
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
