"""Caches of the user's own that attention reads whole: only the positions that forward has written stay keys.

A cache has room for a fixed number of positions. Forward writes the keys of the sequence to the first of them,
attention reads all, and a mask hides the rest. The analysis makes caches of its own, which grow. So attention gets the
written keys and values in the place of the caches, and the columns of the mask that belong to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION, NodeBuilder
from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import Constants
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import DENSE_SIZES, aten, expression, meta, source_line

HIDDEN = -1e4  # an addend of a score at most this hides a key


def keep_written_keys(captured: CapturedGraph) -> int:
    """Rewrite attentions that read caches whole, in place, and return their number.

    The room of the caches becomes a limit of the length. Cost: masks and positions are computed at a few lengths.
    """
    if captured.time is None:
        return 0
    attentions = [node for node in captured.nodes if node.target is ATTENTION and _reads_room(node)]
    if not attentions:
        return 0
    level = binding_times(captured)
    return sum(_Rewrite(captured, level, node).apply() for node in attentions)


def _reads_room(attention: Node) -> bool:
    """Return whether attention reads keys of a fixed number, and has a mask."""
    key, bias = attention.args[1], attention.args[3]
    return isinstance(meta(key).shape[2], int) and isinstance(bias, Node) and meta(bias).shape[-1] == meta(key).shape[2]


class _Rewrite:
    def __init__(self, captured: CapturedGraph, level: Mapping[Node, Level], attention: Node) -> None:
        assert captured.time is not None
        self.captured, self.level, self.attention, self.time = captured, level, attention, captured.time
        self.make = NodeBuilder(captured.graph, attention)
        self.room = meta(attention.args[1]).shape[2]
        self.constants = Constants(captured, level)

    def apply(self) -> bool:
        query, key, value, bias, *rest = self.attention.args
        assert isinstance(bias, Node)
        if not self._hides_the_rest(bias):
            return False
        written = [self._written(node, 2) for node in (key, value)]
        if None in written:
            return False
        length = self.make(aten.sym_size.int, written[0], 2)
        bias = self.make(aten.slice.Tensor, bias, meta(bias).dim() - 1, 0, length)
        self.attention.args = (query, *written, bias, *rest)
        limits = self.captured.limits
        if self.room <= limits.get(self.time, self.room):
            limits[self.time] = self.room
            self.captured.limit_lines.setdefault(self.time, source_line(self.attention))
        self.captured.graph.eliminate_dead_code()
        return True

    def _written(self, node: Any, axis: int) -> Node | None:
        """Return the written part of a value along an axis; None if it is not one row for each position."""
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if self._size(node, axis) == self.time:
            return node
        write = _WRITES.get(node.target)
        if write is not None:
            return write(self, node, axis)
        moved = _MOVES.get(node.target)
        place = moved(node, axis) if moved is not None else None
        if place is None or self._size(node.args[0], place) != self.room:
            return None
        below = self._written(node.args[0], place)
        if below is None:
            return None
        args: list[Any] = list(node.args)
        if node.target in (aten.expand.default, aten.reshape.default):
            sizes = list(args[1])
            sizes[axis] = self.make(aten.sym_size.int, below, place)
            args[1] = sizes
        assert callable(node.target)
        return self.make(node.target, below, *args[1:], **node.kwargs)

    def _size(self, node: Any, axis: int) -> Any:
        size = meta(node).shape[axis]
        return size if isinstance(size, int) else expression(size)

    def _put(self, node: Node, axis: int) -> Node | None:
        """index_put(cache, (None, positions), new)"""
        cache, indices, new, *accumulate = node.args
        assert isinstance(indices, (list, tuple))
        assert isinstance(new, Node)
        places = [i for i, index in enumerate(indices) if index is not None]
        if any(accumulate) or places != [axis] or not self._are_first_positions(indices[axis]):
            return None
        return self._as_part_of(cache, new, axis)

    def _copied(self, node: Node, axis: int) -> Node | None:
        """index_copy(cache, axis, positions, new)"""
        cache, on, positions, new = node.args
        assert isinstance(on, int)
        if on % meta(cache).dim() != axis or not self._are_first_positions(positions):
            return None
        return self._as_part_of(cache, new, axis)

    def _scattered(self, node: Node, axis: int) -> Node | None:
        """slice_scatter(cache, new, axis, start, end)"""
        given: list[Any] = [*node.args]
        cache, new = given[:2]
        on, start = given[2] if len(given) > 2 else 0, given[3] if len(given) > 3 else 0
        if meta(new).shape == meta(cache).shape:
            return self._written(new, axis)
        is_first = on % meta(cache).dim() == axis and start in (0, None) and not node.kwargs
        return self._as_part_of(cache, new, axis) if is_first and self._size(new, axis) == self.time else None

    def _as_part_of(self, cache: Any, new: Any, axis: int) -> Node:
        """Return new values with the axes of the cache and the length of the sequence."""
        sizes = [self.make.size(cache, i) for i in range(meta(cache).dim())]
        sizes[axis] = -1 if self._size(new, axis - meta(cache).dim()) == self.time else self._length()
        return self.make(aten.expand.default, new, sizes)

    def _length(self) -> Node:
        assert self.captured.step is not None
        return self.make(aten.sym_size.int, self.captured.step, 1)

    def _are_first_positions(self, positions: Any) -> bool:
        """Return whether positions are 0 … time − 1."""
        if not isinstance(positions, Node) or self.level[positions] != Level.CONSTANT or meta(positions).dim() != 1:
            return False
        return all(torch.equal(value, torch.arange(length)) for length, value in self._at_lengths(positions))

    def _hides_the_rest(self, bias: Node) -> bool:
        """Return whether a mask hides all keys behind the sequence."""
        if self.level[bias] != Level.CONSTANT:
            return False
        rest = [value[..., length:] for length, value in self._at_lengths(bias)]
        is_bool = meta(bias).dtype == torch.bool
        return not any(bool(part.any() if is_bool else (part > HIDDEN).any()) for part in rest)

    def _at_lengths(self, node: Node) -> list[tuple[int, torch.Tensor]]:
        lengths = sorted({*range(1, min(DENSE_SIZES, self.room) + 1), self.room})
        return [(length, self.constants.at_length(node, length)) for length in lengths]


_WRITES: dict[Any, Callable[[_Rewrite, Node, int], Node | None]] = {
    aten.index_put.default: _Rewrite._put,
    aten.index_copy.default: _Rewrite._copied,
    aten.slice_scatter.default: _Rewrite._scattered,
}


def _kept(node: Node, axis: int) -> int | None:
    return axis


def _of_transpose(node: Node, axis: int) -> int | None:
    axes: Any = node.args[1:3]
    one, other = (int(a) % len(meta(node).shape) for a in axes)
    return {one: other, other: one}.get(axis, axis)


def _of_permute(node: Node, axis: int) -> int | None:
    order: Any = node.args[1]
    return int(order[axis]) % len(meta(node).shape)


def _of_unsqueeze(node: Node, axis: int) -> int | None:
    new = int(node.args[1]) % meta(node).dim()  # type: ignore[arg-type]
    return None if axis == new else axis - (axis > new)


def _of_expand(node: Node, axis: int) -> int | None:
    place = axis - (meta(node).dim() - meta(node.args[0]).dim())
    return place if place >= 0 else None


def _of_reshape(node: Node, axis: int) -> int | None:
    """Return the axis of the operand with the same size and as many elements after it."""
    after = [*meta(node).shape[axis + 1 :]]
    shape = meta(node.args[0]).shape
    for place in range(len(shape)):
        if shape[place] == meta(node).shape[axis] and _product(shape[place + 1 :]) == _product(after):
            return place
    return None


def _product(sizes: Any) -> Any:
    total: Any = sympy.Integer(1)
    for size in sizes:
        total = total * (size if isinstance(size, int) else expression(size))
    return total


def _of_repeat(node: Node, axis: int) -> int | None:
    repeated = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    return axis if isinstance(repeated, int) and repeated % meta(node).dim() != axis else None


_MOVES: dict[Any, Callable[[Node, int], int | None]] = {
    aten.transpose.int: _of_transpose,
    aten.permute.default: _of_permute,
    aten.unsqueeze.default: _of_unsqueeze,
    aten.expand.default: _of_expand,
    aten.reshape.default: _of_reshape,
    aten.repeat_interleave.self_int: _of_repeat,
    aten.clone.default: _kept,
    aten._to_copy.default: _kept,
}
