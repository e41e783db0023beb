"""Lengths of output axes that follow from the length of an input.

Convolutions without padding make (n - k) // s + 1 of n positions, and several of them make the same with other numbers.
Other expressions are not described. Then a row's own positions cannot be distinguished from its padding, so only rows
of one length run together, or results are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy
import torch

from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import MAX_SIZE, expression, meta
from tformer_export.staging.emitter import axis_names
from tformer_runtime.format.manifest import DerivedLength

CHECKED_STEPS = 24  # lengths of the output axis at which the expression is checked, and the greatest


def find_derived_lengths(captured: CapturedGraph, outputs: Iterable[torch.Tensor]) -> dict[str, DerivedLength]:
    """Return name of an axis in the file → its derived length. Cost: some hundred evaluations of each expression."""
    owners = {
        expression(size): name
        for node in captured.inputs.values()
        for size, name in zip(meta(node).shape, axis_names(captured, meta(node)), strict=True)
        if isinstance(size, torch.SymInt) and isinstance(name, str)
    }
    lengths = {}
    for value in outputs:
        for size, name in zip(value.shape, axis_names(captured, value), strict=True):
            size_expression = expression(size)
            if not isinstance(name, str) or size_expression in owners or len(size_expression.free_symbols) != 1:
                continue
            (symbol,) = size_expression.free_symbols
            numbers = _numbers(size_expression, symbol) if symbol in owners else None
            if numbers is not None:
                lengths[name] = DerivedLength(owners[symbol], *numbers)
    return lengths


def _numbers(size_expression: sympy.Expr, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """Return least and stride if an expression is (n - least) // stride + 1; None for other expressions."""

    def at(n: int) -> int:
        return int(size_expression.subs(symbol, n))

    minimum = _first_true(lambda n: at(n) >= 1)
    second = _first_true(lambda n: at(n) >= 2)
    if minimum is None or second is None or second <= minimum:
        return None
    stride = second - minimum
    steps = [*range(1, CHECKED_STEPS), MAX_SIZE // stride]
    edges = [minimum + k * stride for k in steps]
    if all(at(edge) == k + 1 and at(edge - 1) == k for k, edge in zip(steps, edges, strict=True)):
        return minimum, stride
    return None


def _first_true(holds: Callable[[int], bool]) -> int | None:
    """Return the least number from 1 on for which a monotone condition holds."""
    if not holds(MAX_SIZE):
        return None
    low, high = 0, MAX_SIZE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
