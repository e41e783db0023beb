"""Einstein sums of two operands, rewritten as matrix products.

A product of activations with weights can then be quantised, and attention that is written with `einsum` has the form
that attention is recognised by.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, expression, meta


@dataclass(frozen=True)
class _Equation:
    """The letters of the axes of both operands and of the result, in their order."""

    left: str
    right: str
    result: str

    def swapped(self) -> _Equation:
        return _Equation(self.right, self.left, self.result)

    @property
    def batch(self) -> str:
        return "".join(c for c in self.result if c in self.left and c in self.right)

    @property
    def rows(self) -> str:
        return "".join(c for c in self.result if c in self.left and c not in self.right)

    @property
    def columns(self) -> str:
        return "".join(c for c in self.result if c in self.right and c not in self.left)

    @property
    def summed(self) -> str:
        return "".join(c for c in self.right if c in self.left and c not in self.result)


def einsums_to_products(captured: CapturedGraph) -> int:
    """Rewrite the graph in place, and return the number of sums that became products. Linear in the number of nodes.

    Sums of other kinds, such as outer products, stay.
    """
    count = 0
    for node in captured.nodes:
        if node.target is aten.einsum.default and len(arguments(node)[1]) == 2:
            left, right = arguments(node)[1]
            equation = _parse(arguments(node)[0], meta(left).dim(), meta(right).dim())
            if equation is None or not _fits(equation, left, right):
                continue
            if equation.columns and equation.result.replace(equation.batch, "").startswith(equation.columns[0]):
                equation, left, right = equation.swapped(), right, left  # the rows of the result come first
            node.replace_all_uses_with(_product(NodeBuilder(captured.graph, node), equation, left, right))
            count += 1
    captured.graph.eliminate_dead_code()
    return count


def _parse(text: str, *ranks: int) -> _Equation | None:
    """Return the equation of two operands of these ranks, with letters for the axes of an ellipsis."""
    text = text.replace(" ", "")
    if "->" not in text:
        return None
    operands, result = text.split("->")
    free = [c for c in string.ascii_letters if c not in text]
    terms = operands.split(",")
    hidden = {rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term}
    if len(hidden) > 1:
        return None
    dots = "".join(free[: hidden.pop()]) if hidden else ""
    left, right, result = (term.replace("...", dots) for term in (*terms, result))
    return _Equation(left, right, result)


def _fits(equation: _Equation, left: Node, right: Node) -> bool:
    """Return whether the sum is a product: no diagonals, no sum within an operand, no repeated axes of size 1."""
    terms = equation.left, equation.right, equation.result
    if any(len(set(term)) < len(term) for term in terms) or not equation.summed:
        return False
    if set(equation.left + equation.right) != set(equation.result + equation.summed):
        return False
    sizes: dict[str, Any] = {}
    for term, operand in ((equation.left, left), (equation.right, right)):
        for letter, size in zip(term, meta(operand).shape, strict=True):
            if sizes.setdefault(letter, expression(size)) != expression(size):
                return False
    return True


def _product(make: NodeBuilder, equation: _Equation, left: Node, right: Node) -> Node:
    """Return the sum as a product (batch, rows, summed) · (batch, summed, columns), with its axes in their order.

    All rows but the last are further axes of the batch, along which the right operand is broadcast.
    """
    batch, rows, columns, summed = equation.batch, equation.rows, equation.columns, equation.summed
    sizes = {c: (left, i) for i, c in enumerate(equation.left)} | {c: (right, i) for i, c in enumerate(equation.right)}
    left = _permuted(make, left, equation.left, batch + rows + summed)
    if len(summed) > 1:
        left = _reshaped(make, left, sizes, [*(batch + rows), summed])
    if not rows:
        left = make(aten.unsqueeze.default, left, len(batch))
    is_direct = equation.right == batch + summed + columns  # without a transposition
    order = batch + summed + columns if is_direct else batch + columns + summed
    right = _permuted(make, right, equation.right, order)
    if len(columns) != 1 or len(summed) != 1:
        merged = [summed, columns] if is_direct else [columns, summed]
        right = _reshaped(make, right, sizes, [*batch, *merged])
    if batch:
        for _ in rows[1:]:
            right = make(aten.unsqueeze.default, right, len(batch))
    if not is_direct:
        right = make(aten.transpose.int, right, -2, -1)
    result = make(aten.matmul.default, left, right)
    if not rows or len(columns) != 1:
        result = _reshaped(make, result, sizes, [*batch, *rows, *columns])
    return _permuted(make, result, batch + rows + columns, equation.result)


def _permuted(make: NodeBuilder, value: Node, letters: str, order: str) -> Node:
    return value if letters == order else make(aten.permute.default, value, [letters.index(c) for c in order])


def _reshaped(make: NodeBuilder, value: Node, sizes: Mapping[str, tuple[Node, int]], groups: Sequence[str]) -> Node:
    """Reshape a value to one axis for each group of letters; a group without letters has size 1."""
    shape = []
    for group in groups:
        size: Any = 1
        for letter in group:
            factor = make.size(*sizes[letter])
            is_number = isinstance(size, int) and isinstance(factor, int)
            size = factor if size == 1 else size * factor if is_number else make(operator.mul, size, factor)
        shape.append(size)
    return make(aten.reshape.default, value, shape)
