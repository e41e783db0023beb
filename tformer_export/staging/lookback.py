"""Operations that read earlier positions outside attention: a convolution over time, a shifted sequence, a running sum.

A region of operations is *causal* if no result depends on a later position of its operands. It *looks back k positions*
if no result depends on a position more than k before it. Both are found by changing one position of random operands.

A region that looks back k positions is computed for k + n positions in a step of n new ones. The last k rows of its
operands are carried from step to step; before the first token they are zeros, or a constant of the region.

A region may know where the sequence starts, such as a window of attention that hides the places before it. Or it cuts
the sequence into blocks of w positions. Then it is computed from a start of its own, the latest multiple of w that is k
positions or more before the new ones, or the first position. So k + w - 1 rows are carried.

A region that looks back without limit is computed for all positions in each step, from operands that are cached like
keys. Its cost in a step grows with the length of the sequence.

Cost of the search: some dozens of runs of a region, at lengths of a few times k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import is_read_from_data, meta
from tformer_export.common.onnx_operators import take_positions
from tformer_export.staging.regions import find_regions

LENGTHS = 16, 64, 256, 1024  # at which a limit of looking back is sought; one beyond half of the last is none
NUM_CHANGED = 12  # positions that are changed, of each length
MAX_ROUNDING = 1e-4  # of the range of the values; a missing position changes whole digits
PREFIX_LENGTHS = 1, 2, 3, 7, 20, 65  # at which a region without a limit is compared with itself at a greater length


_Kind = Literal["random", "quiet", "loud"]
_SCALES: dict[_Kind, float] = {"random": 1.0, "quiet": 0.01, "loud": 100.0}
_CHANGES: tuple[tuple[_Kind, _Kind], ...] = (
    ("random", "random"),
    ("random", "loud"),
    ("quiet", "loud"),
    ("loud", "quiet"),
)


class Graph(Protocol):
    """The part of `restriction.RestrictionSolver` that the search needs."""

    captured: CapturedGraph
    level: Mapping[Node, Level]
    values: dict[Node, Any]
    order: dict[Node, int]
    time: sympy.Symbol

    def time_axes(self, node: Node) -> list[int]: ...

    def is_exact(self, node: Node, axis: int) -> bool: ...

    def free_axes(self, node: Node) -> list[int]: ...

    def is_timed_size(self, leaf: Any) -> bool: ...

    def size(self, node: Node, time: int) -> int: ...

    def fresh(self, node: Node, time: int) -> Any: ...


@dataclass(frozen=True)
class Lookback:
    """How a region that looks back is computed.

    nodes: its operations, in their order.
    axis: the time axis of its result.
    rows: the number of rows that are carried; None if the region looks back without limit.
    initial: the constant that stands for the rows before the first position; None for zeros.
    period: the region is computed from a start at a multiple of it; None if it is computed from all carried rows.
    """

    nodes: tuple[Node, ...]
    axis: int
    rows: int | None
    initial: Node | None = None
    period: int | None = None

    def offset(self, first: Any) -> Any:
        """Return how far the start is before the first new position, for positions (batch,)."""
        assert self.rows is not None
        assert self.period is not None
        earliest = torch.clamp(first - (self.rows - self.period + 1), min=0)
        return first - torch.div(earliest, self.period, rounding_mode="trunc") * self.period

    def rows_from_start(self, window: torch.Tensor, first: torch.Tensor, time: int) -> torch.Tensor:
        """Return the rows of an operand from the start of each row of the batch on, as many as in the window.

        window: (batch, …), with the carried rows and the new ones on axis `time`. Its last row is repeated at the end,
            where no result that is kept depends on it.
        first: the first new positions (batch,).
        """
        assert self.rows is not None
        skipped = self.rows - self.offset(first)
        places = skipped.unsqueeze(1) + torch.arange(window.shape[time]).unsqueeze(0)
        return take_positions(window, torch.clamp(places, max=window.shape[time] - 1), 0, time)

    def new_rows(self, result: torch.Tensor, first: torch.Tensor, count: int, batch: int, time: int) -> torch.Tensor:
        """Return the rows of the result for the `count` new positions."""
        places = self.offset(first).unsqueeze(1) + torch.arange(count).unsqueeze(0)
        return take_positions(result, places, batch, time)


def find_lookback(graph: Graph, exit: Node) -> Lookback | None:
    """Return the smallest region that ends at `exit` and looks back; one with a limit, if there is one."""
    axes = graph.time_axes(exit)
    if len(axes) != 1 or not isinstance(meta(exit), torch.Tensor) or not graph.is_exact(exit, axes[0]):
        return None
    unlimited = None
    for nodes in _regions(graph, exit):
        region = _Region(graph, nodes, axes[0])
        if not region.sequences or any(map(is_read_from_data, nodes)):
            continue
        try:
            rows = region.num_rows()
            if rows is not None and (found := region.with_limit(rows)) is not None:
                return found
            if unlimited is None and region.is_consistent():
                unlimited = Lookback(nodes, axes[0], None)
        except _NotCausalError:
            continue
        except (RuntimeError, IndexError, ValueError, TypeError):  # it does not run at other sizes
            continue
    return unlimited


def _regions(graph: Graph, exit: Node) -> Iterator[tuple[Node, ...]]:
    """Yield the regions that end at `exit` and whose operands can be cached, the smallest first."""

    def keeps_positions(node: Node) -> bool:
        if graph.level[node] == Level.CONSTANT:
            return True
        axes = graph.time_axes(node)
        is_sequence = len(axes) == 1 and isinstance(meta(node), torch.Tensor) and graph.is_exact(node, axes[0])
        return is_sequence and not graph.free_axes(node)

    if all(map(keeps_positions, (n for n in exit.all_input_nodes if graph.level[n] == Level.STEP))):
        yield (exit,)
    yield from find_regions(exit, graph.level, graph.order, keeps_positions)


class _NotCausalError(Exception):
    """A result depends on a later position, or on a number that Python reads from the data."""


class _Region:
    """A region and the operands that follow from the tokens, each with one time axis."""

    def __init__(self, graph: Graph, nodes: tuple[Node, ...], axis: int) -> None:
        self.graph, self.nodes, self.axis = graph, nodes, axis
        inside = set(nodes)
        leaves = [leaf for node in nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]
        self.outside = [leaf for leaf in dict.fromkeys(leaves) if isinstance(leaf, Node) and leaf not in inside]
        self.sequences = [
            n for n in self.outside if graph.level[n] == Level.STEP and not isinstance(meta(n), torch.SymInt)
        ]
        self.generator = torch.Generator().manual_seed(0)

    def run(self, length: int, sequences: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """Return the result for operands of `length` positions, with the time axis first."""
        results: dict[Node, Any] = dict(sequences)
        for leaf in self.outside:
            if leaf in results:
                continue
            if is_read_from_data(leaf):
                raise _NotCausalError
            if self.graph.is_timed_size(leaf):
                results[leaf] = self.graph.size(leaf, length)
            elif self.graph.level[leaf] == Level.CONSTANT and not isinstance(meta(leaf), torch.SymInt):
                results[leaf] = self.graph.fresh(leaf, length)
            else:
                results[leaf] = self.graph.values[leaf]
        with torch.no_grad():
            for node in self.nodes:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), results.__getitem__)
                results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = results[self.nodes[-1]].movedim(self.axis, 0)
        if result.shape[0] != length:
            raise _NotCausalError
        return result

    def draw(self, length: int, kind: _Kind = "random") -> dict[Node, torch.Tensor]:
        """Draw operands of `length` positions: random numbers, or entries of the traced values."""
        return {node: self._draw(node, length, kind) for node in self.sequences}

    def _draw(self, node: Node, length: int, kind: _Kind) -> torch.Tensor:
        value: torch.Tensor = self.graph.values[node]
        shape = list(value.shape)
        shape[self._axis(node)] = length
        if value.is_floating_point():
            return (_SCALES[kind] * torch.randn(shape, generator=self.generator)).to(value.dtype)
        entries = torch.unique(value)
        if kind == "random":
            drawn: torch.Tensor = entries[torch.randint(len(entries), shape, generator=self.generator)]
            return drawn
        constant: torch.Tensor = entries[0 if kind == "quiet" else -1].expand(shape)
        return constant

    def _axis(self, node: Node) -> int:
        return self.graph.time_axes(node)[0]

    def _rows(self, sequences: Mapping[Node, torch.Tensor], first: int, count: int) -> dict[Node, torch.Tensor]:
        return {node: value.narrow(self._axis(node), first, count) for node, value in sequences.items()}

    def num_rows(self) -> int | None:
        """Return how many positions the region looks back; None without a limit.

        Raises _NotCausalError if it looks ahead.
        """
        limit = self.graph.captured.time_limit
        for length in (n for n in LENGTHS if limit is None or n <= limit):
            furthest = 0
            for position in self._positions(length):
                furthest = max([furthest, *self._lags(length, position)])
                if furthest > length // 2:
                    break
            else:
                if not self._looks_beyond(length // 2, min(LENGTHS[-1], limit or LENGTHS[-1])):
                    return furthest
        return None

    def _looks_beyond(self, distance: int, length: int) -> bool:
        """Return whether results further behind change, if all positions of the first half change."""
        try:
            return any(lag > distance for lag in self._lags(length, 0, max(1, length // 2)))
        except (RuntimeError, IndexError):  # it does not run at this length, so there is no such distance
            return False

    def _positions(self, length: int) -> list[int]:
        """Return positions of the first half, some next to each other."""
        return sorted({*range(4), *(i * length // (2 * NUM_CHANGED) for i in range(NUM_CHANGED)), length - 1})

    def _lags(self, length: int, first: int, count: int = 1) -> list[int]:
        """Return how far behind the last of some changed positions results change.

        A maximum changes only if it was at that position, or comes there. So loud numbers are put among quiet ones too.
        """
        changed: set[int] = set()
        for kind, other_kind in _CHANGES:
            before, other = self.draw(length, kind), self.draw(length, other_kind)
            after = {node: value.clone() for node, value in before.items()}
            for node, value in after.items():
                axis = self._axis(node)
                value.narrow(axis, first, count).copy_(other[node].narrow(axis, first, count))
            changed.update(_changed_rows(self.run(length, before), self.run(length, after)))
        if any(row < first for row in changed):
            raise _NotCausalError
        return [row - (first + count - 1) for row in changed]

    def with_limit(self, rows: int) -> Lookback | None:
        """Return the region with a carry of `rows` rows, if windows of it are right."""
        constants = [
            leaf
            for leaf in self.outside
            if self.graph.level[leaf] == Level.CONSTANT
            and isinstance(meta(leaf), torch.Tensor)
            and not self.graph.time_axes(leaf)
        ]
        for initial in (None, *constants) if rows else (None,):
            if self._is_right(rows, initial):
                return Lookback(self.nodes, self.axis, rows, initial)
        for period in sorted({1, *_divisors(rows), *_divisors(rows + 1)}) if rows else ():
            found = Lookback(self.nodes, self.axis, rows + period - 1, period=period)
            if self._is_right_from_start(found, rows):
                return found
        return None

    def _is_right_from_start(self, lookback: Lookback, rows: int) -> bool:
        period, carried = lookback.period, lookback.rows
        assert period is not None
        assert carried is not None
        firsts = {0, 1, rows, rows + 1, 3 * carried + 5, *(2 * carried + i for i in range(min(period, NUM_CHANGED)))}
        for first, count in itertools.product(sorted(firsts), (1, 3, period + 1)):
            sequences = self.draw(first + count)
            offset = int(lookback.offset(torch.tensor(first)))
            padded = {}
            for node, value in sequences.items():
                axis = self._axis(node)
                kept = value.narrow(axis, first - offset, offset + count)
                last = value.narrow(axis, first + count - 1, 1)
                padded[node] = torch.cat([kept, *[last] * (carried - offset)], axis)
            expected = self.run(first + count, sequences)[first:]
            if _changed_rows(expected, self.run(carried + count, padded)[offset : offset + count]):
                return False
        return True

    def _is_right(self, rows: int, initial: Node | None) -> bool:
        windows = {
            (0, 1),
            (0, 2),
            (0, rows + 3),
            (1, 1),
            (2, 3),
            (rows, 1),
            (rows, 4),
            (rows + 1, 2),
            (3 * rows + 5, 3),
        }
        for first, count in sorted(windows):
            sequences = self.draw(first + count)
            try:
                window = {
                    node: torch.cat([self._before(node, value, rows, initial), value], self._axis(node))
                    for node, value in sequences.items()
                }
            except RuntimeError:  # the constant is not a row of this operand
                return False
            expected = self.run(first + count, sequences)[first:]
            got = self.run(rows + count, self._rows(window, first, rows + count))[rows:]
            if _changed_rows(expected, got):
                return False
        return True

    def _before(self, node: Node, value: torch.Tensor, rows: int, initial: Node | None) -> torch.Tensor:
        """Return the rows of an operand before its first position."""
        axis = self._axis(node)
        shape = [*value.shape[:axis], rows, *value.shape[axis + 1 :]]
        if initial is None:
            return value.new_zeros(shape)
        constant: torch.Tensor = self.graph.fresh(initial, 1)
        if constant.dtype != value.dtype or constant.dim() != value.dim():
            raise RuntimeError
        return constant.expand(shape)

    def is_consistent(self) -> bool:
        """Return whether results do not depend on the number of later positions."""
        limit = self.graph.captured.time_limit
        lengths = [n for n in PREFIX_LENGTHS if limit is None or n <= limit]
        sequences = self.draw(lengths[-1])
        whole = self.run(lengths[-1], sequences)
        for position in self._positions(lengths[-1]):
            self._lags(lengths[-1], position)
        return all(not _changed_rows(whole[:n], self.run(n, self._rows(sequences, 0, n))) for n in lengths[:-1])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _changed_rows(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the rows in which two tensors differ beyond rounding."""
    if not one.is_floating_point():
        return (one != other).reshape(len(one), -1).any(1).nonzero().flatten().tolist()
    scale = float(torch.where(one.isfinite(), one, 0).abs().max()) if one.numel() else 0.0
    close = torch.isclose(one, other, rtol=MAX_ROUNDING, atol=MAX_ROUNDING * scale, equal_nan=True)
    return (~close).reshape(len(one), -1).any(1).nonzero().flatten().tolist()
