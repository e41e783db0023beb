"""The positions that an operation needs of its operands, found by running the operation.

A *window* is a set of new positions [p, p + n). Restricting a value to a window keeps, of each of its time axes, either
the window (role NEW: one row for each new position) or all positions up to the window's end (role ALL: one row for each
position that attention may read). An operation can be decoded step by step if it *commutes with restriction*:

    operation(restricted operands) = restriction of operation(operands)

for some roles of its operands' time axes, with as few ALL as possible. An operation that keeps positions apart commutes
with NEW alone. In attention the keys and values need ALL, and only if it looks nowhere ahead: positions after the
window are not among the restricted operands. An operation that commutes for no roles mixes positions, and is refused.
The test runs on traced values at several windows, for any operation; nothing is assumed by name.

Roles are demanded backwards from the output. Where ALL is demanded of a value that is computed from the step input, the
past has to come from somewhere. This value is a *cut*, and becomes a cache.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.batch_axes import BatchAxis, find_rows
from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import Constants, call
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import describe_node, expression, is_read_from_data, meta, symbols
from tformer_export.staging.layouts import PLAIN, Layout, possible_layouts
from tformer_export.staging.lookback import Lookback, find_lookback
from tformer_export.staging.recurrence import Recurrence, find_recurrence
from tformer_export.staging.regions import find_regions
from tformer_export.staging.restriction_errors import SINGLE_PASS_ADVICE, explain_refusal
from tformer_runtime.base.errors import UnsupportedModelError

NEW, ALL = "new", "all"
# Forms of an operand other than its rows at the new positions (NEW) or at all positions so far (ALL):
BROADCAST = "broadcast"  # of a request value that is equal at every position, such as a mask: one position is kept
ARANGE = "arange"  # of a constant that numbers positions from 0, such as arange(time): computed for the new positions
LOOKBACK_ROWS = "lookback rows"  # of an operand of a region that looks back: its rows at the region's positions
Roles = tuple[tuple[int, str], ...]  # time axis → NEW or ALL, in the order of the axes
AxisChoice = Roles | str | None

PROBE_LENGTH = 6
PROBE_WINDOWS = ((2, 2), (1, 3), (3, 1), (0, 4), (3, 3), (0, 1), (0, 2))  # (first position, how many) at that length
MAX_RELATIVE_ROUNDING = 1e-4  # kernels of different shapes differ by about 1e-6; a missing position by whole digits
MAX_DRAWN_MAGNITUDE = 1e3  # greater numbers hide positions, and stay
MAX_SEARCHED_OPERANDS = 12  # roles of further operands are not searched
MAX_REGION_COMBINATIONS = 64  # a region with more combinations of roles is tried with new rows alone


@dataclass(frozen=True)
class Solution:
    """How a value is computed for a window: by its own operation, or by the operations of a region in their order.

    choices: for each operation one choice for each leaf of (args, kwargs), in pytree order; None for a leaf that is
        computed in the region.
    lookback: how the region looks back, if it does.
    recurrence: how the operation carries states from position to position, if it does.
    """

    nodes: tuple[Node, ...]
    choices: tuple[tuple[AxisChoice, ...], ...]
    lookback: Lookback | None = None
    recurrence: Recurrence | None = None

    @property
    def parts(self) -> Iterator[tuple[Node, tuple[AxisChoice, ...]]]:
        return zip(self.nodes, self.choices, strict=True)

    def operands(self) -> Iterator[tuple[Node, AxisChoice]]:
        """Yield the values that are read from outside, and their choices."""
        for node, choices in self.parts:
            for leaf, choice in zip(pytree.tree_leaves((node.args, node.kwargs)), choices, strict=True):
                if isinstance(leaf, Node) and leaf not in self.nodes:
                    yield leaf, choice


class RestrictionSolver:
    """Demand-driven search for roles. Cost: at most a few dozen runs of each operation, at sizes of about 6."""

    def __init__(
        self,
        captured: CapturedGraph,
        level: Mapping[Node, Level],
        values: Mapping[Node, Any],
        others: Mapping[Node, Any],
        constants: Constants,
    ) -> None:
        """Find the layouts of merged time axes.

        values: the value of every node for two rows of inputs.
        others: the same with another second row.
        """
        assert captured.time is not None
        self.captured, self.level, self.values, self.constants = captured, level, dict(values), constants
        self.others = dict(others)
        self.time: sympy.Symbol = captured.time
        self.order = {node: i for i, node in enumerate(captured.nodes)}
        self.layouts: dict[Node, dict[int, Layout]] = {}  # of the axes that do not simply hold the positions
        self.unknown_layouts: set[Node] = set()  # values whose time axes have no known layout
        self.solutions: dict[tuple[Node, Roles], Solution] = {}
        self.cuts: dict[Node, int] = {}  # cut node → its time axis
        self._fresh: dict[tuple[Node, int], Any] = {}
        self._rows: dict[Node, BatchAxis | None] = {}
        self._evened: set[Node] = set()  # attentions whose operands are replaced at the moment
        self.sizes = {  # symbol → its size in the values
            size.node.expr: values[node].shape[axis]
            for node in captured.inputs.values()
            for axis, size in enumerate(meta(node).shape)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
        }
        self._find_layouts()

    # -- axes -----------------------------------------------------------------------------------------------------

    def time_axes(self, node: Node) -> list[int]:
        """Return the axes whose size has the time symbol; for a list of tensors, the axes of the first one."""
        value = _first(meta(node))
        if not isinstance(value, torch.Tensor):
            return []
        return [axis for axis, size in enumerate(value.shape) if self.time in symbols(size)]

    def is_timed_size(self, leaf: Any) -> bool:
        return isinstance(leaf, Node) and isinstance(meta(leaf), torch.SymInt) and self.time in symbols(meta(leaf))

    def roles(self, node: Node, role: str = NEW) -> Roles:
        return tuple((axis, role) for axis in self.time_axes(node))

    def is_exact(self, node: Node, axis: int) -> bool:
        return bool(expression(_first(meta(node)).shape[axis]) == self.time)

    def layout(self, node: Node, axis: int) -> Layout:
        """Return the layout of a time axis, if it is known."""
        return self.layouts.get(node, {}).get(axis, PLAIN)

    def has_layout(self, node: Node, axis: int) -> bool:
        """Return whether the layout of a constant's time axis is known."""
        return self.is_exact(node, axis) or axis in self.layouts.get(node, {})

    def _find_layouts(self) -> None:
        """Find the layouts of time in axes of another size, such as batch and time flattened.

        The layout of an operation's result is the one at which the operation commutes with restriction.
        """
        self._find_constant_layouts()
        for node in self.captured.nodes:
            if self.level[node] == Level.CONSTANT or node.op != "call_function":
                continue
            if not all(self.is_exact(node, axis) for axis in self.time_axes(node)) and not self._find_layout(node):
                self.layouts.pop(node, None)
                self.unknown_layouts.add(node)

    def _find_layout(self, node: Node) -> bool:
        axes = self.time_axes(node)
        others = [axis for axis in axes if not self.is_exact(node, axis)]
        for layouts in itertools.product(*(list(self._possible_layouts(node, axis)) for axis in others)):
            self.layouts[node] = dict(zip(others, layouts, strict=True))
            if self._search((node,), self.roles(node), (NEW,)) is not None:
                return True
            # Attention over padded keys has a padded result, or padded scores.
            is_padded = any(layout.is_padded for layout in layouts)
            for roles in itertools.product((NEW, ALL), repeat=len(axes)) if is_padded else ():
                if NEW in roles and self._search((node,), tuple(zip(axes, roles, strict=True)), (NEW, ALL)) is not None:
                    return True
        return False

    def _possible_layouts(self, node: Node, axis: int) -> Iterable[Layout]:
        size = expression(_first(meta(node)).shape[axis])
        return possible_layouts(size, self.time, _first(self.values[node]).shape[axis], PROBE_LENGTH)

    def _find_constant_layouts(self) -> None:
        """Find the layouts of constants with rows besides those of the positions, such as a mask with a further column.

        At another number of positions, a constant has the same rows where both have them.
        """
        padded = [
            node
            for node in self.captured.nodes
            if self.level[node] == Level.CONSTANT
            and isinstance(meta(node), torch.Tensor)
            and any(not self.is_exact(node, axis) for axis in self.time_axes(node))
        ]
        for node in padded:
            axes = self.time_axes(node)
            try:
                longer = self.fresh(node, PROBE_LENGTH + 1)
            except RuntimeError:  # it cannot be computed at this size
                continue
            for layouts in itertools.product(*(list(self._possible_layouts(node, axis)) for axis in axes)):
                if any(longer.shape[a] != y.rows(PROBE_LENGTH + 1) for a, y in zip(axes, layouts, strict=True)):
                    continue
                corner = longer
                for axis, layout in zip(axes, layouts, strict=True):
                    corner = layout.restrict(corner, axis, PROBE_LENGTH + 1, 0, PROBE_LENGTH)
                if is_close(corner, self.values[node]):
                    self.layouts[node] = dict(zip(axes, layouts, strict=True))
                    break

    def restrict(self, node: Node, roles: Roles, window: tuple[int, int]) -> Any:
        """Return the node's value, narrowed on its time axes."""
        first, count = window
        value = self.values[node]
        tensors = value if isinstance(value, (list, tuple)) else [value]
        traced = meta(node) if isinstance(value, (list, tuple)) else [meta(node)]
        restricted = []
        for tensor, traced_value in zip(tensors, traced, strict=True):
            for axis, role in roles:
                if axis >= tensor.dim() or self.time not in symbols(traced_value.shape[axis]):
                    continue  # an additional result, such as statistics, or a state after all positions
                start, size = (first, count) if role == NEW else (0, first + count)
                tensor = self.layout(node, axis).restrict(tensor, axis, PROBE_LENGTH, start, size)
            restricted.append(tensor.contiguous())
        return restricted if isinstance(value, (list, tuple)) else restricted[0]

    # -- search ---------------------------------------------------------------------------------------------------

    def solve(self, node: Node, roles: Roles) -> Solution:
        """Return the choice of operands that computes `node` in these roles.

        If the operation alone cannot do so, the smallest region before it that can is chosen.

        Raises UnsupportedModelError if there is none.
        """
        key = node, roles
        if key not in self.solutions:
            solution = self._read_far_rows(node, roles)
            if solution is None and not self._needs_whole_result(node, roles):
                solution = self._search((node,), roles, (NEW, ALL))
            if solution is None and all(role == NEW for _, role in roles):
                solution = self._carry_states(node)
            regions = [] if solution is not None else find_regions(node, self.level, self.order, self._has_known_layout)
            in_blocks = []  # at the length of the probe all positions may be in one block
            for region in regions:
                if any(map(self._is_cut_into_blocks, region)):
                    in_blocks.append(region)
                elif (solution := self._search(region, roles, (NEW, ALL))) is not None:
                    break
            if solution is None and all(role == NEW for _, role in roles):
                solution = self._look_back(node)
            for region in in_blocks if solution is None else ():
                if (solution := self._search(region, roles, (NEW, ALL))) is not None:
                    break
            if solution is None:
                looks_ahead = all(role == NEW for _, role in roles) and self._looks_ahead(node, roles)
                raise UnsupportedModelError(explain_refusal(self, node, looks_ahead))
            self.solutions[key] = solution
        return self.solutions[key]

    def num_recomputed(self, nodes: Container[Node]) -> int:
        """Return the number of regions, those that end at `nodes`, that a step computes for all positions."""
        found = [s.lookback for (node, _), s in self.solutions.items() if node in nodes]
        return sum(lookback is not None and lookback.rows is None for lookback in found)

    def _is_cut_into_blocks(self, node: Node) -> bool:
        """Return whether a size of a value follows from the time by division, such as the number of whole blocks."""
        value = meta(node)
        tensors = value if isinstance(value, (list, tuple)) else [value]
        sizes = [size for v in tensors for size in (v.shape if isinstance(v, torch.Tensor) else [v])]
        return any(
            self.time in symbols(size) and not expression(size).is_polynomial(self.time)
            for size in sizes
            if isinstance(size, torch.SymInt)
        )

    def _carry_states(self, node: Node) -> Solution | None:
        """Return the solution of a loop over positions by the states that it carries."""
        recurrence = find_recurrence(self, node)
        if recurrence is None:
            return None
        choices = tuple(self.roles(leaf) or None if isinstance(leaf, Node) else None for leaf in node.args)
        return Solution((node,), (choices,), recurrence=recurrence)

    def _look_back(self, node: Node) -> Solution | None:
        """Return the solution by a region that looks back."""
        lookback = find_lookback(self, node)
        if lookback is None:
            return None
        if self.rows(node) is None and (lookback.rows is None or lookback.period is not None):
            return None  # each row of the batch has its own new positions
        inside = set(lookback.nodes)
        leaves = [pytree.tree_leaves((part.args, part.kwargs)) for part in lookback.nodes]
        for leaf in itertools.chain.from_iterable(leaves):
            if isinstance(leaf, Node) and leaf not in inside and self.level[leaf] == Level.STEP:
                rows = self.rows(leaf)
                if rows is None or (lookback.initial is not None and rows.times > 1):
                    return None  # its carry would have no axis for the rows of a batch
        choices = [
            [LOOKBACK_ROWS if isinstance(x, Node) and x not in inside else None for x in part] for part in leaves
        ]
        return Solution(lookback.nodes, tuple(map(tuple, choices)), lookback)

    def _read_far_rows(self, node: Node, roles: Roles) -> Solution | None:
        """Return the solution of an operation that reads rows further back than the probe has positions.

        At the length of the probe, a convolution with a dilation of 8 reads the zeros in front of the sequence alone.
        """
        if not all(role == NEW for _, role in roles) or not self._may_read_far_rows(node):
            return None
        solution = self._look_back(node)
        return solution if solution is not None and solution.lookback is not None and solution.lookback.rows else None

    def _may_read_far_rows(self, node: Node) -> bool:
        """Return whether its operands have as many rows besides the positions as the probe has positions.

        False for rows that come through attention, which is decoded with a cache.
        """
        padded: set[Node] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current.target is ATTENTION or len(self.time_axes(current)) > 1:
                return False
            above = {a for a in current.all_input_nodes if self._has_many_other_rows(a)} - padded
            padded |= above
            pending += above
        return bool(padded)

    def _has_many_other_rows(self, node: Node) -> bool:
        sizes = (expression(_first(meta(node)).shape[axis]) - self.time for axis in self.time_axes(node))
        return any(bool(other.is_number and other >= PROBE_LENGTH) for other in sizes)

    def _needs_whole_result(self, node: Node, roles: Roles) -> bool:
        """Return whether a node selects a result of an operation with several results that cannot all be decoded.

        An example is the maximum of a row, which can be decoded, and its index, which cannot.
        """
        if node.target is not operator.getitem or self.level[node] != Level.STEP:
            return False
        results = node.all_input_nodes[0]
        try:
            self.solve(results, self.roles(results) if len(self.time_axes(results)) != len(roles) else roles)
        except UnsupportedModelError:
            return True
        return False

    def _has_known_layout(self, node: Node) -> bool:
        """Return whether the positions of a value have axes of their own, or a known layout."""
        if self.level[node] == Level.CONSTANT:
            return all(self.has_layout(node, axis) for axis in self.time_axes(node))
        return bool(self.time_axes(node)) and node not in self.unknown_layouts

    def _search(
        self,
        nodes: tuple[Node, ...],
        roles: Roles,
        allowed: tuple[str, ...],
        windows: tuple[tuple[int, int], ...] = PROBE_WINDOWS,
    ) -> Solution | None:
        """Return the first choice of operands with which the last of `nodes` commutes.

        Choices with few ALL come first.
        """
        if nodes[0].target is ATTENTION and nodes[0] not in self._evened:
            with self._with_even_scores(nodes[0]):
                return self._search(nodes, roles, allowed, windows)
        inside = frozenset(nodes)
        leaves = [pytree.tree_leaves((node.args, node.kwargs)) for node in nodes]
        options = [[self._options(leaf, allowed, inside) for leaf in part] for part in leaves]
        if any(choices == [] for part in options for choices in part):
            return None
        slots = _searched_slots(leaves, options)
        choices = [[possible[0] for possible in part] for part in options]
        for combination in _combinations([options[part][place] for (part, place), *_ in slots], len(nodes) > 1):
            for same_choice, choice in zip(slots, combination, strict=True):
                for part, place in same_choice:
                    choices[part][place] = choice
            solution = Solution(nodes, tuple(map(tuple, choices)))
            if all(self._commutes(solution, roles, window) for window in windows) and (
                self._commutes_elsewhere(solution, roles, windows)
            ):
                return solution
        return None

    def _commutes_elsewhere(self, solution: Solution, roles: Roles, windows: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a choice is right for other values too: those of the other rows, and drawn ones.

        An attention that sees the present document alone needs no earlier keys where each document has one position.
        One whose weights are all on one position needs no others.
        """
        node = solution.nodes[0]
        elsewhere: list[dict[Node, Any] | None] = [self.others, self._drawn_values(solution)]
        if node in self._evened:
            values = {**self.others, **{n: self.values[n] for n in node.args[:3] if isinstance(n, Node)}}
            values[node] = call(node, values.__getitem__)
            elsewhere = [values]
        for other in elsewhere:
            if other is None:
                continue
            before, self.values = self.values, other
            try:
                if not all(self._commutes(solution, roles, window) for window in windows):
                    return False
            finally:
                self.values = before
        return True

    def _drawn_values(self, solution: Solution) -> dict[Node, Any] | None:
        """Return the values with other magnitudes of the numbers that a region reads; None if it does not run on them.

        Signs, zeros and numbers that hide a position stay, because operations may rely on them.
        """
        generator = torch.Generator().manual_seed(0)
        values = dict(self.values)
        for leaf, _ in solution.operands():
            value = values[leaf]
            if self.level[leaf] == Level.STEP and isinstance(value, torch.Tensor) and value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator).abs().to(value.dtype) * value.sign()
                values[leaf] = torch.where(value.abs() < MAX_DRAWN_MAGNITUDE, drawn, value)
        try:
            with torch.no_grad():
                for node in solution.nodes:
                    values[node] = call(node, values.__getitem__)
        except (RuntimeError, IndexError, ValueError):
            return None
        return values

    @contextmanager
    def _with_even_scores(self, node: Node) -> Iterator[None]:
        """Replace the operands of an attention by small random numbers within a `with` block.

        The search tries which positions of the operands change the result. If softmax gives one position all the
        weight, no other position changes the result, and the search would conclude that the attention does not need
        them. Small random operands give every position some weight.
        """
        operands = [a for a in node.args[:3] if isinstance(a, Node)]
        before = {n: self.values[n] for n in (node, *operands)}
        generator = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(before[n].shape, generator=generator, dtype=before[n].dtype) for n in operands}
        self.values |= drawn
        self.values[node] = call(node, self.values.__getitem__)
        self._evened.add(node)
        try:
            yield
        finally:
            self._evened.discard(node)
            self.values |= before

    def _options(self, leaf: Any, allowed: tuple[str, ...], inside: frozenset[Node]) -> list[AxisChoice]:
        """Return the possible choices of an operand; none for a value without a known layout."""
        if not isinstance(leaf, Node) or leaf in inside:
            return [None]
        if leaf in self.unknown_layouts or is_read_from_data(leaf):
            return []
        if self.is_timed_size(leaf):
            return [((0, role),) for role in allowed]
        axes = self.time_axes(leaf)
        if not axes:
            return [None]
        per_axis: list[AxisChoice] = [
            tuple(zip(axes, roles, strict=True)) for roles in itertools.product(allowed, repeat=len(axes))
        ]
        if self.level[leaf] == Level.CONSTANT:
            return [*per_axis, ARANGE] if all(self.has_layout(leaf, a) for a in axes) else [ARANGE]
        return [BROADCAST, *per_axis] if self.level[leaf] == Level.REQUEST else per_axis

    def _commutes(self, solution: Solution, roles: Roles, window: tuple[int, int]) -> bool:
        """Return whether a choice of operands gives the restricted result at this window."""
        results: dict[Node, Any] = {}
        try:
            with torch.no_grad():
                for node, choices in solution.parts:
                    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
                    operands = [
                        results[leaf]
                        if isinstance(leaf, Node) and leaf in results
                        else self.operand(leaf, choice, window)
                        for leaf, choice in zip(leaves, choices, strict=True)
                    ]
                    args, kwargs = pytree.tree_unflatten(operands, spec)
                    results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError):  # sizes that do not fit each other: not these roles
            return False
        last = solution.nodes[-1]
        return is_close(results[last], self.restrict(last, roles, window))

    def operand(self, leaf: Any, choice: AxisChoice, window: tuple[int, int]) -> Any:
        """Return an operand at a window, in the form of the choice."""
        if not isinstance(leaf, Node):
            return leaf
        if isinstance(meta(leaf), torch.SymInt):
            if not isinstance(choice, tuple):
                return self.values[leaf]
            ((_, role),) = choice
            return self.size(leaf, window[1] if role == NEW else sum(window))
        if choice is None:
            return self.values[leaf]
        if choice == BROADCAST:
            value = self.values[leaf]
            for axis in self.time_axes(leaf):
                value = value.narrow(axis, 0, 1)
            return value
        if choice == ARANGE:
            return self.fresh(leaf, window[1])
        return self.restrict(leaf, choice, window)  # type: ignore[arg-type]

    def size(self, node: Node, time: int) -> int:
        """Return a traced size with `time` positions and the other symbols as in the values."""
        return int(expression(meta(node)).subs({**self.sizes, self.time: time}))

    def fresh(self, node: Node, time: int) -> Any:
        """Return a constant computed for another number of positions."""
        key = node, time
        if key not in self._fresh:
            try:
                self._fresh[key] = self.constants.at([node], {**self.sizes, self.time: time})[node]
            except (RuntimeError, IndexError) as error:
                raise RuntimeError("cannot be computed at this size") from error
        return self._fresh[key]

    def _looks_ahead(self, node: Node, roles: Roles) -> bool:
        """Return whether a node commutes at the windows that end with the last position."""
        last = tuple(w for w in PROBE_WINDOWS if sum(w) == PROBE_LENGTH)
        return self._search((node,), roles, (NEW, ALL), last) is not None

    # -- cut points -----------------------------------------------------------------------------------------------

    def cut(self, node: Node) -> Node:
        """Return the value that is cached for a value whose past is needed.

        It is the value itself, or a nearer one to the inputs that holds each number once and has one plain time axis,
        if only operations that rearrange or repeat numbers are between them.
        """
        best, current = node, node
        while (above := self.rearranged_operand(current)) is not None:
            current = above
            if self._can_be_cached(current) and (
                not self._can_be_cached(best) or self.values[current].numel() < self.values[best].numel()
            ):
                best = current
        if self.free_axes(best):
            raise UnsupportedModelError(
                f"{describe_node(node)} is needed for earlier positions too, and it has an axis whose size follows "
                "from another input, so it has no place in a cache of fixed size. Compute it for the earlier positions "
                "again from a value that has no such axis, or " + SINGLE_PASS_ADVICE
            )
        if not self._can_be_cached(best):
            raise UnsupportedModelError(
                f"{describe_node(node)} needs the past of a value whose batch or time axis is "
                "merged with another in a way that cannot be told apart; keep batch and time as axes of their own"
            )
        self.cuts[best] = self.time_axes(best)[0]
        return best

    def _can_be_cached(self, node: Node) -> bool:
        axes = self.time_axes(node)
        if len(axes) != 1 or node in self.unknown_layouts or self.rows(node) is None or self.free_axes(node):
            return False
        return self.is_exact(node, axes[0]) or self.layout(node, axes[0]).is_padded

    def free_axes(self, node: Node) -> list[int]:
        """Return the axes whose size follows neither from the batch nor from the positions, such as source length."""
        value = _first(meta(node))
        known = {self.time, *self.captured.batch}
        return (
            [a for a, size in enumerate(value.shape) if symbols(size) - known]
            if isinstance(value, torch.Tensor)
            else []
        )

    def rows(self, node: Node) -> BatchAxis | None:
        """Return the axis of a value that holds the rows of the batch, if it is unambiguous."""
        if node not in self._rows:
            value = self.values[node]
            axis = None
            if isinstance(value, torch.Tensor):
                axis = find_rows(self.captured, meta(node).shape, value, self.others[node])
            self._rows[node] = axis or self._rows_of_drawn_operands(node)
        return self._rows[node]

    def _rows_of_drawn_operands(self, node: Node) -> BatchAxis | None:
        """Return the axis of the rows of an operation's result for small random operands.

        The result for real inputs may be the same for all rows, such as a mask of padding of rows without padding.
        Cost: two runs of the operation.
        """
        operands = [
            a for a in node.all_input_nodes
            if isinstance(self.values[a], torch.Tensor) and self.level[a] != Level.CONSTANT
        ]  # fmt: skip
        rows = [self.rows(a) for a in operands]
        if node.op != "call_function" or not operands or not isinstance(meta(node), torch.Tensor) or None in rows:
            return None
        generator = torch.Generator().manual_seed(0)
        drawn, changed = dict(self.values), dict(self.values)
        for operand, axis in zip(operands, rows, strict=True):
            assert axis is not None
            value = self.values[operand]
            lowest = -1 if value.is_floating_point() else 0
            first, second = (torch.randint(lowest, 2, value.shape, generator=generator).to(value.dtype) for _ in "12")
            second_row = torch.zeros(value.shape, dtype=torch.bool)
            axis.split(lambda function, *args: function(*args), second_row).select(axis.batch_axis, 1).fill_(True)
            drawn[operand], changed[operand] = first, torch.where(second_row, second, first)
        try:
            results = call(node, drawn.__getitem__), call(node, changed.__getitem__)
        except (RuntimeError, IndexError):
            return None
        return find_rows(self.captured, meta(node).shape, *results)

    def batch_axis(self, node: Node) -> int | None:
        """Return the axis whose size is the batch size, if there is exactly one."""
        axes = [a for a, size in enumerate(meta(node).shape) if expression(size) in self.captured.batch]
        return axes[0] if len(axes) == 1 else None

    def rearranged_operand(self, node: Node) -> Node | None:
        """Return the node's operand, if the node only rearranges or repeats its numbers."""
        tensors = [a for a in node.all_input_nodes if isinstance(meta(a), torch.Tensor)]
        if len(tensors) != 1 or not isinstance(meta(node), torch.Tensor) or self.level[tensors[0]] != self.level[node]:
            return None
        source = self.values[tensors[0]]
        if not isinstance(source, torch.Tensor) or source.numel() > self.values[node].numel():
            return None
        dtype = source.dtype if source.is_floating_point() else torch.int64  # two booleans could not be distinguished
        marked = torch.arange(1, source.numel() + 1, dtype=torch.float64).reshape(source.shape).to(dtype)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        operands = [marked if x is tensors[0] else self.values[x] if isinstance(x, Node) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(operands, spec)
        try:
            moved = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError):
            return None
        is_same = moved.dtype == marked.dtype and torch.isin(moved, marked).all() and torch.isin(marked, moved).all()
        return tensors[0] if is_same else None


_Slot = tuple[int, int]  # the operation in its region, and the place of an operand among its leaves


def _searched_slots(
    leaves: Sequence[Sequence[Any]], options: Sequence[Sequence[Sequence[AxisChoice]]]
) -> list[list[_Slot]]:
    """Return the operands with more than one possible choice. Those of one list get the same choice.

    One value may be read twice, as the new rows and as all of them. In a large region it is read in one way.
    """
    slots = [(i, k) for i, part in enumerate(options) for k, possible in enumerate(part) if len(possible) > 1]
    if len(slots) <= MAX_SEARCHED_OPERANDS or len(leaves) == 1:
        return [[slot] for slot in slots]
    by_value: dict[Any, list[_Slot]] = {}
    for part, place in slots:
        by_value.setdefault(leaves[part][place], []).append((part, place))
    return list(by_value.values())


def _combinations(options: Sequence[Sequence[AxisChoice]], is_region: bool) -> list[tuple[AxisChoice, ...]]:
    """Return the combinations of choices to try, those with few ALL first.

    options: the possible choices of each operand.
    """
    if len(options) > MAX_SEARCHED_OPERANDS:
        searched, others = options[:MAX_SEARCHED_OPERANDS], options[MAX_SEARCHED_OPERANDS:]
        options = [*([possible[0], possible[-1]] for possible in searched), *(possible[:1] for possible in others)]
    combinations: Iterable[tuple[AxisChoice, ...]] = itertools.product(*options)
    if is_region and math.prod(map(len, options)) > MAX_REGION_COMBINATIONS:
        new_rows = tuple(possible[0] for possible in options)
        numbered_from_0 = tuple(possible[-1] if ARANGE in possible else possible[0] for possible in options)
        combinations = [new_rows, numbered_from_0]
    return sorted(combinations, key=_num_all)


def _num_all(choices: tuple[AxisChoice, ...]) -> int:
    """Return the number of axes that are needed at all positions."""
    return sum(role == ALL for choice in choices if isinstance(choice, tuple) for _, role in choice)


def _first(value: Any) -> Any:
    """Return the first of several tensors, or the value itself."""
    return value[0] if isinstance(value, (list, tuple)) else value


def is_close(result: Any, expected: Any) -> bool:
    """Return whether two results are equal up to rounding, and infinite or NaN at the same places."""
    if isinstance(expected, (list, tuple)):
        return len(result) == len(expected) and all(map(is_close, result, expected))
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        return False
    if torch.equal(result, expected):
        return True
    if not result.is_floating_point():
        return False
    finite = expected.isfinite()
    if not torch.equal(
        torch.where(finite, 0.0, expected.nan_to_num(2.0)), torch.where(finite, 0.0, result.nan_to_num(2.0))
    ):
        return False
    scale = torch.where(finite & (expected.abs() < 1e30), expected, 0.0).abs().max() if expected.numel() else 0.0
    return bool(
        torch.allclose(
            result[finite], expected[finite], rtol=MAX_RELATIVE_ROUNDING, atol=float(MAX_RELATIVE_ROUNDING * scale)
        )
    )
