"""`x.roll(1, 1)` whose first row forward overwrites: the previous position of each, written as a rotation.

A rotation puts the last rows in front of the first. So the first positions look ahead, unless forward hides these rows:
`y = x.roll(1, 1); y[:, 0] = 0`. Then zeros stand in their place in the rewritten graph, and each position looks back.

That the rows are hidden is proven, for no sample shows a rare id: each way from the rotation to the output goes through
operations row by row, up to one that overwrites these rows whatever the data are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import Constants
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import DENSE_SIZES, aten, expression, meta

LONGER = 64, 512  # lengths at which masks are computed, besides all up to DENSE_SIZES
END = 2**62  # of a slice that goes to the end
_SAME_ROWS = {aten.clone.default, aten._to_copy.default, aten.alias.default}
_FILLS = {aten.fill.Tensor, aten.fill.Scalar}
_MASKED_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}


def replace_hidden_wraps(captured: CapturedGraph) -> int:
    """Replace hidden wrapped rows by zeros in the graph, and return the number of rotations that were rewritten.

    Cost: the masks that hide the rows are computed at some twenty lengths.
    """
    rotations = [(node, shift) for node in captured.nodes if (shift := _shift(captured, node)) is not None]
    if not rotations:
        return 0
    proof = _Proof(captured)
    hidden = [(node, count, axis) for node, (count, axis) in rotations if proof.hides(node, count, axis)]
    for node, count, axis in hidden:
        _look_back(captured, node, count, axis)
    return len(hidden)


def _shift(captured: CapturedGraph, node: Node) -> tuple[int, int] | None:
    """Return by how many positions a node rotates a value towards the end, and the axis; None if it does not."""
    if node.target is not aten.roll.default or len(node.args) < 3:
        return None
    shifts, axes = node.args[1:]
    assert isinstance(shifts, (list, tuple))
    assert isinstance(axes, (list, tuple))
    if len(shifts) != 1 or len(axes) != 1 or not isinstance(shifts[0], int) or shifts[0] < 1:
        return None
    axis = int(axes[0]) % meta(node).dim()  # type: ignore[arg-type]
    is_time = captured.time is not None and expression(meta(node).shape[axis]) == captured.time
    return (shifts[0], axis) if is_time else None


@dataclass(frozen=True)
class _Wrapped:
    """A value and its rows that come from the end of the sequence. axis: None if the whole value does."""

    node: Node
    axis: int | None
    rows: frozenset[int]


class _Unknown(Exception):  # noqa: N818 (no error: a way on which the rows may be seen)
    """An operation through which wrapped rows may reach a result."""


class _Proof:
    def __init__(self, captured: CapturedGraph) -> None:
        self.captured, self.level = captured, binding_times(captured)
        self.constants = Constants(captured, self.level)

    def hides(self, rotation: Node, count: int, axis: int) -> bool:
        todo, seen = [_Wrapped(rotation, axis, frozenset(range(count)))], set()
        try:
            while todo:
                wrapped = todo.pop()
                if wrapped in seen:
                    continue
                seen.add(wrapped)
                for user in wrapped.node.users:
                    todo += self._after(user, wrapped)
        except _Unknown:
            return False
        return True

    def _after(self, user: Node, wrapped: _Wrapped) -> Iterator[_Wrapped]:
        """Yield the wrapped rows of the result of an operation; nothing if it has none."""
        args, value, axis = list(user.args), wrapped.node, wrapped.axis
        if user.target is aten.sym_size.int or (user.target in _FILLS and value not in args[1:]):
            return  # they read the sizes alone
        if axis is None:
            raise _Unknown
        if user.target in _SAME_ROWS or (user.target is aten.embedding.default and args[0] is not value):
            rows = wrapped.rows
        elif user.target is aten.select.int and args[1] % meta(value).dim() == axis:
            if args[2] in wrapped.rows:
                yield _Wrapped(user, None, wrapped.rows)
            elif not isinstance(args[2], int) or args[2] < 0:
                raise _Unknown
            return
        elif user.target is aten.select_scatter.default and args[0] is value and args[1] is not value:
            if args[2] % meta(value).dim() != axis or not isinstance(args[3], int):
                raise _Unknown
            rows = wrapped.rows - {args[3]}
        elif user.target is aten.slice_scatter.default:
            rows = self._after_scatter(args, wrapped)
        elif user.target in _MASKED_FILLS and args[0] is value and value not in args[1:]:
            rows = self._not_true(args[1], wrapped, True)
        elif user.target is aten.where.self and (args[1] is value) != (args[2] is value) and args[0] is not value:
            rows = self._not_true(args[0], wrapped, args[2] is value)
        else:
            raise _Unknown
        if rows:
            yield _Wrapped(user, axis, rows)

    @staticmethod
    def _after_scatter(args: list[Any], wrapped: _Wrapped) -> frozenset[int]:
        """slice_scatter(base, new, axis, start, end, step)"""
        base, new, on, start, end, step = [*args, *[None] * 6][:6]
        start, end, on = start or 0, END if end is None else end, on or 0
        if step not in (None, 1) or not isinstance(start, int) or not isinstance(end, int) or min(start, end) < 0:
            raise _Unknown
        is_rows = on % meta(wrapped.node).dim() == wrapped.axis
        if not is_rows and (start, end >= END) != (0, True):
            raise _Unknown
        rows: frozenset[int] = frozenset()
        if base is wrapped.node:
            rows |= wrapped.rows - frozenset(range(start, min(end, max(wrapped.rows) + 1))) if is_rows else frozenset()
        if new is wrapped.node:
            rows |= frozenset(row + start for row in wrapped.rows) if is_rows else wrapped.rows
        return rows

    def _not_true(self, mask: Any, wrapped: _Wrapped, answer: bool) -> frozenset[int]:
        """Return the rows at which a mask that follows from sizes alone does not have this answer everywhere."""
        assert wrapped.axis is not None
        if not isinstance(mask, Node) or self.level[mask] != Level.CONSTANT:
            raise _Unknown
        axis = wrapped.axis - (meta(wrapped.node).dim() - meta(mask).dim())
        left: set[int] = set()
        for length in self._lengths(max(wrapped.rows) + 1):
            value = self.constants.at_length(mask, length)
            for row in wrapped.rows:
                if row < length:
                    of_row = value if axis < 0 or value.shape[axis] == 1 else value.select(axis, row)
                    left |= {row} if not bool((of_row == answer).all()) else set()
        return frozenset(left)

    def _lengths(self, count: int) -> list[int]:
        limit = self.captured.time_limit or max(LONGER)
        return sorted({n for n in (*range(1, DENSE_SIZES), count, count + 1, *LONGER, limit) if n <= limit})


def _look_back(captured: CapturedGraph, node: Node, count: int, axis: int) -> None:
    make, source = NodeBuilder(captured.graph, node), node.args[0]
    assert isinstance(source, Node)
    sizes = [make.size(source, i) if i != axis else count for i in range(meta(node).dim())]
    zeros = make(aten.full.default, sizes, 0, dtype=meta(node).dtype)
    padded = make(aten.cat.default, [zeros, source], axis)
    shifted = make(aten.slice.Tensor, padded, axis, 0, make.size(source, axis))
    node.replace_all_uses_with(shifted)
    captured.graph.erase_node(node)
