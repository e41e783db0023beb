"""Constants that are indexed by position: evaluated once, up to the maximum length, and proven to be tables.

A decode step reads the row of position *p* from a table of the maximum length, where the full-sequence model computed
it for the sequence at hand. The two agree only if the value at length *n* is the corner of the value at any greater
length (prefix consistency), which is proven here by evaluating at three lengths; where it fails, the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.batch_axes import Rows, times_batch
from tformer_export.common.fx_nodes import expression, meta, source_line
from tformer_export.staging.plan import CachedAttention
from tformer_export.staging.restriction import LENGTH, Views
from tformer_runtime.base.errors import UnsupportedModelError

DEFAULT_LENGTH = 512
LOW = 1e4  # a bias beyond this hides a key


@dataclass(frozen=True)
class Table:
    """values: the constant at the maximum length, without a batch: where it has one, on the axis of `rows`, there are
    the entries of one row, which are those of every row.

    A form that is kept in the file is asked for with the place of the batch's axis: `missing` axes of size 1 are put in
    front first, and then axis `batch` is where the rows of a batch will be. With `merged`, that axis is kept beside it.
    """

    values: torch.Tensor
    time_axes: tuple[int, ...]
    batch_rows: Rows | None

    def rows(self, missing: int, batch: int, axis: int, merged: bool = False) -> torch.Tensor:
        """(length, the other axes without the batch's): the table by its time axis `axis`."""
        values = self.values[(None,) * missing]
        return values.movedim(axis, 0) if merged else values.squeeze(batch).movedim(axis - (batch < axis), 0)

    def diagonals(self, missing: int, batch: int, merged: bool = False) -> torch.Tensor | None:
        """Where the table depends only on (second time axis − first): its values by that difference, (2 · length − 1,
        the other axes without the batch's). Reading them costs what is read, where a row costs the maximum length."""
        values = self.values[(None,) * missing]
        first, second = (axis + missing for axis in self.time_axes)
        if not merged:
            first, second = first - (batch < first), second - (batch < second)
            values = values.squeeze(batch)
        values = values.movedim((first, second), (0, 1))
        length = values.shape[0]
        offset = torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1) + length - 1
        diagonals = torch.cat([values[1:, 0].flip(0), values[0]])
        return diagonals if torch.equal(diagonals[offset], values) else None

    @property
    def causal_only(self) -> bool:
        """Whether, as a bias, it does nothing but hide later positions."""
        if len(self.time_axes) != 2:
            return False
        values = self.values.movedim(self.time_axes, (-2, -1))
        past = torch.ones(values.shape[-2:], dtype=torch.bool).tril()
        return bool(values[..., past].all() if values.dtype == torch.bool else (values[..., past] == 0).all())


def is_causal_alone(attention: CachedAttention, tables: Mapping[Node, Table]) -> bool:
    """Whether an attention's bias, if it has one, hides what comes later and does nothing else."""
    table = tables.get(attention.bias) if attention.bias is not None else None
    return attention.bias is None or (table is not None and table.causal_only)


def make_tables(
    views: Views, nodes: Iterable[Node], still: Iterable[Node], wanted: int | None, preferred: int | None = None
) -> tuple[dict[Node, Table], int]:
    """The tables and the maximum length: `wanted`, or else the greatest up to `preferred` that the model allows.

    nodes: constants that are indexed by position. still: those without positions, which are proven to be the same at
    any length. Raises UnsupportedModelError if `wanted` is more than the model allows, or a constant is not
    prefix-consistent. Memory is that of the largest constants, length² for a mask.
    """
    source = _Constants(views, list(nodes), list(still))
    if wanted is not None:
        source.check(wanted)
        length = wanted
    else:
        preferred = preferred or DEFAULT_LENGTH
        length = _greatest(source.exist, min(preferred, views.captured.time_limit or preferred))
        # A position embedding may change beyond the length that a model was first trained for.
        consistent = _greatest(source.are_consistent, length)
        length = consistent if consistent > 2 * LENGTH else length
    source.prove(length)
    values = source.at(length)
    return {n: _table(views, n, values[n]) for n in source.nodes}, length


def _greatest(holds: Callable[[int], bool], most: int) -> int:
    """The greatest length up to `most` for which something holds that holds for LENGTH and ceases once."""
    if holds(most):
        return most
    low, high = LENGTH, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass
class _Constants:
    """The constants that are to be tables, at any length. relative: biases of which only differences count."""

    views: Views
    nodes: list[Node]
    still: list[Node]
    relative: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        short, long = self.at(LENGTH), self.at(LENGTH + 1)
        self.relative = {n for n in self.nodes if _is_bias(n) and not self._is_corner(n, short[n], long[n])}

    def at(self, length: int, nodes: list[Node] | None = None) -> dict[Node, torch.Tensor]:
        """Their values, for a batch of two."""
        nodes = [*self.nodes, *self.still] if nodes is None else nodes
        held = [*self.views.captured.inputs.values(), *nodes]
        sizes = {s: 2 for n in held for d in n.meta["val"].shape for s in expression(d).free_symbols}
        values = self.views.constants.at(nodes, {**sizes, self.views.time: length})
        return {n: _from_first_key(value) if n in self.relative else value for n, value in values.items()}

    def exist(self, length: int) -> bool:
        try:
            values = self.at(length)
        except (RuntimeError, IndexError):
            return False
        return all(values[n].shape[axis] == length for n in self.nodes for axis in self.views.time_axes(n))

    def check(self, wanted: int) -> None:
        captured = self.views.captured
        if (captured.time_limit is None or wanted <= captured.time_limit) and self.exist(wanted):
            return
        limit = captured.time_limit
        line = captured.bounded.get(self.views.time)
        why = f"at most {limit} is possible, by {line}" if limit and line else "its position tables end before"
        raise UnsupportedModelError(f"the model cannot run at a length of {wanted}: {why}")

    def are_consistent(self, length: int) -> bool:
        return self._first_changed(length) is None

    def prove(self, length: int) -> None:
        """UnsupportedModelError if a value at a shorter length is not the corner of the value at this one."""
        changed = self._first_changed(length)
        if changed is not None:
            node = changed[0]
            culprit = self._culprit(*changed)
            what = "a number that changes" if node in self.still else "a table whose values change"
            raise UnsupportedModelError(
                f"`{culprit.target}` at {source_line(culprit)} makes {what} with the length of the sequence, so "
                "that what was cached would become wrong as the sequence grows; make it depend on "
                "positions alone, or fix its length"
            )

    def _first_changed(self, length: int) -> tuple[Node, int] | None:
        """The first whose value at a shorter length is not the corner of that at `length`, and that length."""
        long = self.at(length)
        for shorter, nodes in ((1, self.still), (LENGTH, None), (length // 2 + 1, None)):
            short = self.at(min(shorter, length), nodes)
            for node in short:
                if not self._is_corner(node, short[node], long[node]):
                    return node, shorter
        return None

    def _is_corner(self, node: Node, short: torch.Tensor, long: torch.Tensor) -> bool:
        for axis in self.views.time_axes(node):
            long = long.narrow(axis, 0, short.shape[axis])
        if not short.is_floating_point():
            return torch.equal(short, long)
        return torch.allclose(short, long, rtol=1e-5, atol=1e-6, equal_nan=True)

    def _culprit(self, node: Node, length: int) -> Node:
        """The earliest ancestor that already changes with the length, for the message."""
        views = self.views
        ancestors = views.constants.ancestors([node])
        tabled = [
            n
            for n in views.captured.nodes
            if n in ancestors and views.time_axes(n) and all(views.is_exact(n, a) for a in views.time_axes(n))
        ]
        short, long = (self.at(size, tabled) for size in (length - 1, length))
        return next((n for n in tabled if not self._is_corner(n, short[n], long[n])), node)


def _is_bias(node: Node) -> bool:
    """Whether a constant is nothing but what attentions add to their scores."""
    added = isinstance(meta(node), torch.Tensor) and meta(node).is_floating_point()
    return added and all(user.target is ATTENTION and user.args.index(node) == 3 for user in node.users)


def _from_first_key(bias: torch.Tensor) -> torch.Tensor:
    """The bias with each query's for its first key as zero, where that is finite: softmax does not see what is added to
    all of a query's scores, and distances that are counted from the end become distances from the beginning."""
    first = bias[..., :1]
    return bias - torch.where(first.isfinite() & (first.abs() < LOW), first, 0.0)


def _table(views: Views, node: Node, values: torch.Tensor) -> Table:
    axes = tuple(views.time_axes(node))
    sized = [a for a, d in enumerate(meta(node).shape) if expression(d).free_symbols and a not in axes]
    repeats = [times_batch(views.captured, meta(node).shape[a]) for a in sized]
    if None in repeats or len(sized) > 1:
        raise UnsupportedModelError(
            f"`{node.target}` at {source_line(node)} makes a table over positions whose other axes are sized by the "
            "input, which cannot be kept in the file"
        )
    if not sized:
        return Table(values.contiguous(), axes, None)
    axis, times = sized[0], repeats[0] or 1
    if times > 1 and torch.equal(values.narrow(axis, 0, 1).expand_as(values), values):
        return Table(values.narrow(axis, 0, 1).contiguous(), axes, None)  # whoever reads it knows its rows' order
    for outer in (True, False):
        apart = Rows(axis, times, outer).split(lambda function, *args: function(*args), values) if times > 1 else values
        first, second = apart.unbind(Rows(axis, times, outer).own_axis)
        if torch.equal(first, second):
            return Table(first.unsqueeze(axis) if times == 1 else first, axes, Rows(axis, times, outer))
    raise UnsupportedModelError(
        f"`{node.target}` at {source_line(node)} makes a table over positions that differs from row to row"
    )
