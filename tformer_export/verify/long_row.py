"""The longest row on which a single-pass model is compared: as long as the file promises, if that costs little.

A table may end, or a path may change, at a length that no short row has. The cost of a row follows from the sizes of
the captured graph and not from a clock, so that each export of a model compares the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.input_facts import InputFacts
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, expression, meta

UNLIMITED_LENGTH = 500  # of a row of an input without a limit
MAX_PRODUCTS = 50_000_000_000  # multiplications of a row: about a second on two cores
MAX_NUMBERS = 1 << 26  # of one value: 256 MB
_CONTRACTS: dict[object, tuple[int, int]] = {  # product → its operand, and the axis over which it sums
    aten.linear.default: (0, -1),
    aten.addmm.default: (1, -1),
    aten.mm.default: (0, -1),
    aten.bmm.default: (0, -1),
    aten.matmul.default: (0, -1),
    aten.baddbmm.default: (1, -1),
}


def longest_length(inputs: Mapping[str, InputFacts], names: Mapping[str, torch.Tensor]) -> int:
    """Return the greatest length of an input, or UNLIMITED_LENGTH if one has no limit. names: of the inputs to draw."""
    return max((inputs[name].max_length or UNLIMITED_LENGTH for name in names if name in inputs), default=0)


def affordable_row(
    captured: CapturedGraph, length: int, shortest: int, draw: Callable[[int], dict[str, np.ndarray]]
) -> dict[str, np.ndarray] | None:
    """Return a drawn row of this length, or of the greatest one that is affordable; None if no longer one is.

    shortest: a length that is compared anyway. draw: returns a row without its batch axis.
    """
    last: dict[str, tuple[int, ...]] = {}
    while length > shortest:
        row = draw(length)
        shapes = {name: value.shape for name, value in row.items()}
        if shapes == last:  # no input has the length
            return None
        if _is_affordable(captured, shapes):
            return row
        last, length = shapes, length * 3 // 4
    return None


def _is_affordable(captured: CapturedGraph, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    sizes: dict[sympy.Symbol, int] = dict.fromkeys(captured.batch, 1)
    for name, node in captured.inputs.items():
        for size, drawn in zip(meta(node).shape[1:], shapes.get(name, ()), strict=False):
            if expression(size).is_Symbol:
                sizes.setdefault(expression(size), drawn)
    known: dict[sympy.Expr, int | None] = {}

    def number(size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        formula = expression(size)
        if formula not in known:
            value = formula.subs(sizes)
            known[formula] = int(value) if value.is_Integer else None
        return known[formula] or 1  # a size that follows from data

    products = 0
    for node in captured.nodes:
        value = meta(node)
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        count = math.prod(map(number, value.shape))
        products += count * _products(node, number)
        if count > MAX_NUMBERS or products > MAX_PRODUCTS:
            return False
    return True


def _products(node: Node, number: Callable[[int | torch.SymInt], int]) -> int:
    """Return the multiplications for each number of a result."""
    if node.target in _CONTRACTS:
        operand, axis = _CONTRACTS[node.target]
        return number(meta(node.args[operand]).shape[axis])
    if node.target is ATTENTION:
        return 2 * number(meta(node.args[1]).shape[2])
    if node.target is aten.convolution.default:
        return math.prod(map(number, meta(node.args[1]).shape[1:]))
    return 1
