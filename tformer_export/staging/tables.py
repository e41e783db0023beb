"""Constants that are indexed by position: evaluated once, up to the maximum length, and proven to be tables.

A decode step reads the row of position *p* from a table of the maximum length, where the full-sequence model computed
it for the sequence at hand. The two agree only if the value at length *n* is the corner of the value at any greater
length (prefix consistency), which is proven here by evaluating at three lengths; where it fails, the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from tformer_export.capture import Captured, expression, meta, source_line
from tformer_export.staging.batch import Rows, times_batch
from tformer_export.staging.evaluate import Constants
from tformer_export.staging.levels import Level
from tformer_export.staging.views import LENGTH, Views
from tformer_runtime.errors import UnsupportedModelError

DEFAULT_LENGTH = 512


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


def make_tables(
    captured: Captured,
    level: Mapping[Node, Level],
    views: Views,
    constants: Constants,
    nodes: Iterable[Node],
    wanted: int | None,
    preferred: int | None = None,
) -> tuple[dict[Node, Table], int]:
    """The tables and the maximum length: `wanted`, or else the greatest up to `preferred` that the model allows.

    Raises UnsupportedModelError if `wanted` is more than the model allows, or a constant is not prefix-consistent.
    Memory is that of the largest constants, length² for a mask.
    """
    nodes = list(nodes)

    def works(length: int) -> bool:
        try:
            values = _evaluate(captured, constants, nodes, length)
        except (RuntimeError, IndexError):
            return False
        return all(values[n].shape[axis] == length for n in nodes for axis in views.time_axes(n))

    if wanted is not None:
        if (captured.time_limit is not None and wanted > captured.time_limit) or not works(wanted):
            limit, line = (
                captured.time_limit,
                captured.bounded.get(captured.time) if captured.time is not None else None,
            )
            why = f"at most {limit} is possible, by {line}" if limit and line else "its position tables end before"
            raise UnsupportedModelError(f"the model cannot run at a length of {wanted}: {why}")
        length = wanted
    else:
        preferred = preferred or DEFAULT_LENGTH
        length = min(preferred, captured.time_limit or preferred)
        if not works(length):
            low, high = LENGTH, length
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if works(middle) else (low, middle)
            length = low
    values = _evaluate(captured, constants, nodes, length)
    for shorter in (min(LENGTH, length), length // 2 + 1):
        _prove_prefix(captured, level, views, constants, nodes, values, shorter)
    return {n: _table(captured, views, n, values[n]) for n in nodes}, length


def _evaluate(captured: Captured, constants: Constants, nodes: list[Node], length: int) -> dict[Node, torch.Tensor]:
    assert captured.time is not None
    sizes = {s: 2 for n in nodes for d in n.meta["val"].shape for s in expression(d).free_symbols}
    sizes |= dict.fromkeys(_all_symbols(captured), 2)
    return constants.at(nodes, {**sizes, captured.time: length})


def _all_symbols(captured: Captured) -> set[sympy.Symbol]:
    return {s for n in captured.inputs.values() for d in n.meta["val"].shape for s in expression(d).free_symbols}


def _prove_prefix(
    captured: Captured,
    level: Mapping[Node, Level],
    views: Views,
    constants: Constants,
    nodes: list[Node],
    values: Mapping[Node, torch.Tensor],
    length: int,
) -> None:
    shorter = _evaluate(captured, constants, nodes, length)
    for node in nodes:
        if not _is_corner(views, node, shorter[node], values[node], length):
            culprit = _first_inconsistent(captured, level, views, constants, node, length)
            raise UnsupportedModelError(
                f"`{culprit.target}` at {source_line(culprit)} makes a table whose values change with the length of "
                "the sequence, so that what was cached would become wrong as the sequence grows; make it depend on "
                "positions alone, or fix its length"
            )


def _is_corner(views: Views, node: Node, short: torch.Tensor, long: torch.Tensor, length: int) -> bool:
    for axis in views.time_axes(node):
        long = long.narrow(axis, 0, length)
    if not short.is_floating_point():
        return torch.equal(short, long)
    return torch.allclose(short, long, rtol=1e-5, atol=1e-6, equal_nan=True)


def _first_inconsistent(
    captured: Captured,
    level: Mapping[Node, Level],
    views: Views,
    constants: Constants,
    node: Node,
    length: int,
) -> Node:
    """The earliest ancestor that already changes with the length, for the message."""
    ancestors = constants.ancestors([node])
    tabled = [
        n
        for n in captured.nodes
        if n in ancestors and views.time_axes(n) and all(views.is_exact(n, a) for a in views.time_axes(n))
    ]
    short, long = (_evaluate(captured, constants, tabled, size) for size in (length - 1, length))
    return next((n for n in tabled if not _is_corner(views, n, short[n], long[n], length - 1)), node)


def _table(captured: Captured, views: Views, node: Node, values: torch.Tensor) -> Table:
    axes = tuple(views.time_axes(node))
    sized = [a for a, d in enumerate(meta(node).shape) if expression(d).free_symbols and a not in axes]
    repeats = [times_batch(captured, meta(node).shape[a]) for a in sized]
    if None in repeats or len(sized) > 1:
        raise UnsupportedModelError(
            f"`{node.target}` at {source_line(node)} makes a table over positions whose other axes are sized by the "
            "input, which cannot be kept in the file"
        )
    if not sized:
        return Table(values.contiguous(), axes, None)
    axis, times = sized[0], repeats[0] or 1
    for outer in (True, False):
        apart = Rows(axis, times, outer).split(lambda function, *args: function(*args), values) if times > 1 else values
        first, second = apart.unbind(Rows(axis, times, outer).own_axis)
        if torch.equal(first, second):
            return Table(first.unsqueeze(axis) if times == 1 else first, axes, Rows(axis, times, outer))
    raise UnsupportedModelError(
        f"`{node.target}` at {source_line(node)} makes a table over positions that differs from row to row"
    )
