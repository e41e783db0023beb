"""Constants that are indexed by position: evaluated once, up to the maximum length, and proven to be tables.

A decode step reads the row of position p from a table of the maximum length, where the model computed it for the
sequence at hand. The two agree only if the value at length n is the corner of the value at any greater length (prefix
consistency). This is proven by evaluation at three lengths.

Where it fails, the results of the model may be the same still. A scale that is counted from the middle of the sequence
is one factor of queries and another of keys, and their products depend on the distance alone (Sun et al. 2022, "A
Length-Extrapolatable Transformer"). Such tables are taken at the maximum length for sequences of any length, if the
model gives the same results with them. This is proven by running it. Otherwise the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.batch_axes import BatchAxis, times_batch
from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import run
from tformer_export.common.fx_nodes import as_function, describe_node, expression, meta, source_line
from tformer_export.common.option_values import DEFAULT_MAX_LENGTH
from tformer_export.staging.layouts import PLAIN, Layout
from tformer_export.staging.plan import CachedAttention
from tformer_export.staging.restriction import PROBE_LENGTH, RestrictionSolver
from tformer_runtime.base.errors import UnsupportedModelError

MAX_VISIBLE_BIAS = 1e4  # a bias of this magnitude hides a key
REPLACED_LENGTHS = 2, 3, PROBE_LENGTH, 65, 1024  # at which a model runs with tables of the maximum length
_NUMBERS = "TensorType", "NumberType"  # of an argument that a value is computed by; a size has the type IntType
SIZES_OF_OTHERS = 1, 2, 3, 8, 64  # such as the rows of a batch, at which a number of the length is evaluated
MAX_REPLACED_ROUNDING = 2e-5  # of the range of the results; tables of other magnitudes round differently


@dataclass(frozen=True)
class Table:
    """A constant at the maximum length.

    layouts: of the time axes.
    values: without a batch. If the constant has one, the axis of `batch_rows` has the entries of one row, which are
        equal for all rows.

    The methods return the form that is stored in the file, for the place of the batch axis. First `missing` axes of
    size 1 are added in front. Then axis `batch` is the axis of the batch. With `merged`, this axis is kept.
    """

    values: torch.Tensor
    time_axes: tuple[int, ...]
    batch_rows: BatchAxis | None
    layouts: tuple[Layout, ...] = ()

    def layout(self, axis: int) -> Layout:
        """Return the layout of a time axis."""
        return self.layouts[self.time_axes.index(axis)] if self.layouts else PLAIN

    def rows(self, missing: int, batch: int, axis: int, merged: bool = False) -> torch.Tensor:
        """Return the table by its time axis `axis`: (length, the other axes without the batch axis)."""
        values = self.values[(None,) * missing]
        return values.movedim(axis, 0) if merged else values.squeeze(batch).movedim(axis - (batch < axis), 0)

    def diagonals(self, missing: int, batch: int, merged: bool = False) -> torch.Tensor | None:
        """Return the table by the difference of its time axes, if it depends on (second time axis − first) only.

        Return None otherwise. The shape is (2 · length − 1, the other axes without the batch axis). Reading it costs as
        much as the entries read, where a row costs the maximum length.
        """
        if any(layout.is_padded for layout in self.layouts):
            return None
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
        """Return whether the table, as a bias, only hides later positions."""
        if len(self.time_axes) != 2 or any(layout.is_padded for layout in self.layouts):
            return False
        values = self.values.movedim(self.time_axes, (-2, -1))
        past = torch.ones(values.shape[-2:], dtype=torch.bool).tril()
        return bool(values[..., past].all() if values.dtype == torch.bool else (values[..., past] == 0).all())


def is_causal_alone(attention: CachedAttention, tables: Mapping[Node, Table]) -> bool:
    """Return whether an attention's bias, if it has one, only hides later positions."""
    table = tables.get(attention.bias) if attention.bias is not None else None
    return attention.bias is None or (table is not None and table.causal_only)


def make_tables(
    solver: RestrictionSolver,
    nodes: Iterable[Node],
    invariant: Iterable[Node],
    required: int | None,
    preferred: int | None = None,
) -> tuple[dict[Node, Table], int]:
    """Return the tables and the maximum length: `required`, or else the greatest possible length up to `preferred`.

    nodes: constants that are indexed by position.
    invariant: constants without positions, which are proven to be the same at any length.
    Memory: that of the largest constants, length² for a mask.

    Raises UnsupportedModelError if `required` is more than the model allows, or if a constant is not prefix-consistent.
    """
    source = _Constants(solver, list(nodes), list(invariant))
    _limit_by_numbers(solver, required or preferred or DEFAULT_MAX_LENGTH)
    if required is not None:
        source.check(required)
        length = required
    else:
        preferred = preferred or DEFAULT_MAX_LENGTH
        length = _greatest(source.exist, min(preferred, solver.captured.time_limit or preferred))
        # A position embedding may change beyond the length that a model was first trained for.
        consistent = _greatest(source.are_consistent, length)
        length = consistent if consistent > 2 * PROBE_LENGTH else length
    source.prove(length)
    values = source.at(length)
    return {n: _table(solver, n, values[n]) for n in source.nodes}, length


def _limit_by_numbers(solver: RestrictionSolver, longest: int) -> None:
    """Limit the length to that up to which the numbers of sizes by which values are computed are the same, in place.

    `x * (1 + time // 25)` is right for steps as long as the number is 1. Numbers that change at short lengths are
    refused before. Cost: each number is evaluated at all lengths.
    """
    captured, time = solver.captured, solver.time
    for node in captured.nodes:
        if solver.level[node] != Level.STEP or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in _arguments(node):
            number = meta(value).node.expr if isinstance(meta(value), (torch.SymInt, torch.SymFloat)) else None
            if number is None or argument.type.kind() not in _NUMBERS or time not in number.free_symbols:
                continue
            high = min(longest, captured.limits.get(time, longest))
            for others in SIZES_OF_OTHERS:
                at = as_function(number.subs(dict.fromkeys(number.free_symbols - {time}, others)), time)
                changed = next((n for n in range(2, high + 1) if at(n) != at(1)), None)
                if changed is not None and changed > PROBE_LENGTH:
                    high = changed - 1
                    captured.limits[time] = high
                    captured.limit_lines[time] = source_line(node)


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operation with their values."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for argument, value in zip(arguments, node.args, strict=False):
        yield argument, value
    for argument in arguments:
        if argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _greatest(holds: Callable[[int], bool], maximum: int) -> int:
    """Return the greatest length up to `maximum` for which a monotone condition holds that holds for PROBE_LENGTH."""
    if holds(maximum):
        return maximum
    low, high = PROBE_LENGTH, maximum
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass
class _Constants:
    """The constants that become tables, at any length.

    relative: biases of which only differences within a query count.
    """

    solver: RestrictionSolver
    nodes: list[Node]
    invariant: list[Node]
    relative: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        short, long = self.at(PROBE_LENGTH), self.at(PROBE_LENGTH + 1)
        length = PROBE_LENGTH + 1
        self.relative = {n for n in self.nodes if _is_bias(n) and not self._is_corner(n, short[n], long[n], length)}

    def at(self, length: int, nodes: list[Node] | None = None) -> dict[Node, torch.Tensor]:
        """Return their values for a batch of two."""
        nodes = [*self.nodes, *self.invariant] if nodes is None else nodes
        sized_nodes = [*self.solver.captured.inputs.values(), *nodes]
        sizes = {s: 2 for n in sized_nodes for d in n.meta["val"].shape for s in expression(d).free_symbols}
        values = self.solver.constants.at(nodes, {**sizes, self.solver.time: length})
        return {n: _from_first_key(value) if n in self.relative else value for n, value in values.items()}

    def exist(self, length: int) -> bool:
        try:
            values = self.at(length)
        except (RuntimeError, IndexError):
            return False
        return all(
            values[n].shape[axis] == self.solver.layout(n, axis).rows(length)
            for n in self.nodes
            for axis in self.solver.time_axes(n)
        )

    def check(self, length: int) -> None:
        captured = self.solver.captured
        if (captured.time_limit is None or length <= captured.time_limit) and self.exist(length):
            return
        limit = captured.time_limit
        line = captured.limit_lines.get(self.solver.time)
        why = f"at most {limit} is possible, by {line}" if limit and line else "its position tables end before"
        raise UnsupportedModelError(f"the model cannot run at a length of {length}: {why}")

    def are_consistent(self, length: int) -> bool:
        return not self._changed(length)

    def prove(self, length: int) -> None:
        """Raise UnsupportedModelError if a value at a shorter length is not the corner of the value at this length.

        Tables may differ if the model gives the same results with those of this length.
        """
        changed = self._changed(length)
        if changed and (not changed.keys().isdisjoint(self.invariant) or not self._can_be_replaced(changed, length)):
            node, shorter = next(iter(changed.items()))
            culprit = self._culprit(node, shorter)
            kind = "a number that changes" if node in self.invariant else "a table whose values change"
            raise UnsupportedModelError(
                f"{describe_node(culprit)} makes {kind} with the length of the sequence, so "
                "that what was cached would become wrong as the sequence grows; make it depend on "
                "positions alone, or fix its length"
            )

    def _changed(self, length: int) -> dict[Node, int]:
        """Return the constants that are not prefix-consistent, and the shorter length at which each differs first."""
        long, changed = self.at(length), dict[Node, int]()
        for shorter, nodes in ((1, self.invariant), (PROBE_LENGTH, None), (length // 2 + 1, None)):
            short = self.at(min(shorter, length), nodes)
            for node in short:
                if node not in changed and not self._is_corner(node, short[node], long[node], length):
                    changed[node] = shorter
        return changed

    def _can_be_replaced(self, nodes: Iterable[Node], length: int) -> bool:
        """Return whether the model gives the same results with the tables of this length in the place of its own.

        Cost: two forwards at each of some lengths, with two rows.
        """
        captured, solver, long = self.solver.captured, self.solver, self.at(length)
        generator = torch.Generator().manual_seed(0)
        results = [captured.output, *captured.extras.values()]
        for size in (n for n in REPLACED_LENGTHS if n <= length):
            inputs = {name: solver.values[node] for name, node in captured.inputs.items()}
            step: torch.Tensor = inputs[captured.step_name or ""]
            inputs[captured.step_name or ""] = step[:, torch.randint(step.shape[1], (size,), generator=generator)]
            corners = {node: self._corner(node, long[node], size, length) for node in nodes}
            try:
                own, others = run(captured, inputs), run(captured, inputs, corners)
            except (RuntimeError, IndexError):
                return False
            for node in results:
                scale = float(own[node].abs().max())
                if not torch.allclose(own[node], others[node], rtol=0, atol=MAX_REPLACED_ROUNDING * scale):
                    return False
        return True

    def _corner(self, node: Node, long: torch.Tensor, size: int, length: int) -> torch.Tensor:
        for axis in self.solver.time_axes(node):
            long = self.solver.layout(node, axis).restrict(long, axis, length, 0, size)
        return long

    def _is_corner(self, node: Node, short: torch.Tensor, long: torch.Tensor, length: int) -> bool:
        """Return whether a constant is the corner of its value `long` at `length`."""
        axes = self.solver.time_axes(node)
        if axes:
            layout = self.solver.layout(node, axes[0])
            long = self._corner(node, long, short.shape[axes[0]] - layout.rows(0), length)
        if not short.is_floating_point():
            return torch.equal(short, long)
        return torch.allclose(short, long, rtol=1e-5, atol=1e-6, equal_nan=True)

    def _culprit(self, node: Node, length: int) -> Node:
        """Return the earliest ancestor that already changes with the length, for the message."""
        solver = self.solver
        ancestors = solver.constants.ancestors([node])
        tabled = [
            n
            for n in solver.captured.nodes
            if n in ancestors and solver.time_axes(n) and all(solver.is_exact(n, a) for a in solver.time_axes(n))
        ]
        short, long = (self.at(size, tabled) for size in (length - 1, length))
        return next((n for n in tabled if not self._is_corner(n, short[n], long[n], length)), node)


def _is_bias(node: Node) -> bool:
    """Return whether attentions only add a constant to their scores."""
    added = isinstance(meta(node), torch.Tensor) and meta(node).is_floating_point()
    return added and all(user.target is ATTENTION and user.args.index(node) == 3 for user in node.users)


def _from_first_key(bias: torch.Tensor) -> torch.Tensor:
    """Subtract each query's bias for its first key, where that is finite.

    Softmax ignores a number that is added to all scores of a query. Distances that are counted from the end become
    distances from the beginning.
    """
    first = bias[..., :1]
    return bias - torch.where(first.isfinite() & (first.abs() < MAX_VISIBLE_BIAS), first, 0.0)


def _table(solver: RestrictionSolver, node: Node, values: torch.Tensor) -> Table:
    """Return a constant as a table.

    Raises UnsupportedModelError if it depends on sizes of the request, or differs from row to row.
    """
    axes = tuple(solver.time_axes(node))
    sized = [a for a, d in enumerate(meta(node).shape) if expression(d).free_symbols and a not in axes]
    repeats = [times_batch(solver.captured, meta(node).shape[a]) for a in sized]
    if None in repeats or len(sized) > 1:
        raise UnsupportedModelError(
            f"{describe_node(node)} makes a table over positions whose other axes are sized by the "
            "input, which cannot be kept in the file"
        )
    layouts = tuple(solver.layout(node, axis) for axis in axes)
    if not sized:
        return Table(values.contiguous(), axes, None, layouts)
    axis, times = sized[0], repeats[0] or 1
    if times > 1 and torch.equal(values.narrow(axis, 0, 1).expand_as(values), values):
        return Table(
            values.narrow(axis, 0, 1).contiguous(), axes, None, layouts
        )  # its reader knows the order of its rows
    for outer in (True, False):
        unmerged = (
            BatchAxis(axis, times, outer).split(lambda function, *args: function(*args), values)
            if times > 1
            else values
        )
        first, second = unmerged.unbind(BatchAxis(axis, times, outer).batch_axis)
        if torch.equal(first, second):
            return Table(first.unsqueeze(axis) if times == 1 else first, axes, BatchAxis(axis, times, outer), layouts)
    raise UnsupportedModelError(f"{describe_node(node)} makes a table over positions that differs from row to row")
