"""What does each operation need of the past? The question is put to the operation itself.

A *window* is a set of new positions [p, p + n). Restricting a value to a window keeps, of each of its time axes, either
the window (role NEW: one row for each new position) or all positions up to the window's end (role ALL: one row for each
position that attention may read). An operation can be decoded incrementally if it *commutes with restriction*:

    operation(restricted operands) = restriction of operation(operands)

for some roles of its operands' time axes, with as few ALL as possible. An operation that keeps positions apart does so
with NEW alone. In attention the keys and values need ALL, and only if it looks nowhere ahead: positions after the
window are not among the restricted operands. An operation that commutes for no roles mixes positions, and is refused.
The test is run on traced values at several windows, for any operation there is or will be; nothing is assumed by name.

Roles are demanded backwards from the output. Where ALL is demanded of a value that is computed from the step input, the
past has to come from somewhere: that is a *cut point*, and becomes a cache.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.batch_axes import Rows, find_rows
from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import Constants, call
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, is_counted, meta, source_line, symbols
from tformer_export.staging.regions import closing_regions
from tformer_export.staging.restriction_errors import why_not
from tformer_runtime.base.errors import UnsupportedModelError

NEW, ALL = "new", "all"
ONE = "one"  # a request value that is the same at every position: computed once, for one position
FRESH = "fresh"  # a constant that indexes whatever rows are present: computed for as many as are new
Roles = tuple[tuple[int, str], ...]  # time axis → NEW or ALL, in the order of the axes
Choice = Roles | str | None

LENGTH = 6
WINDOWS = ((2, 2), (1, 3), (3, 1), (0, 4), (3, 3), (0, 1), (0, 2))  # (first position, how many) at that length
RELATIVE = 1e-4  # kernels of different shapes round differently by about 1e-6; a missing position changes whole digits
MOST_AXES = 12  # choices beyond 2 ** this are not searched
MOST_OF_REGION = 64  # choices for a region; a larger one is tried with new rows alone


@dataclass(frozen=True)
class Solution:
    """How a value is computed for a window: by its own operation, or by those of a region, in their order.

    choices: for each operation one choice for each leaf of (args, kwargs), in pytree order; None for a leaf that is
    computed in the region.
    """

    nodes: tuple[Node, ...]
    choices: tuple[tuple[Choice, ...], ...]

    @property
    def parts(self) -> Iterator[tuple[Node, tuple[Choice, ...]]]:
        return zip(self.nodes, self.choices, strict=True)

    def operands(self) -> Iterator[tuple[Node, Choice]]:
        """What is read from outside, and how."""
        for node, choices in self.parts:
            for leaf, choice in zip(pytree.tree_leaves((node.args, node.kwargs)), choices, strict=True):
                if isinstance(leaf, Node) and leaf not in self.nodes:
                    yield leaf, choice


class Views:
    """Demand-driven search for roles. Cost: at most a few dozen runs of each operation at sizes of about 6."""

    def __init__(
        self,
        captured: Captured,
        level: Mapping[Node, Level],
        values: Mapping[Node, Any],
        others: Mapping[Node, Any],
        constants: Constants,
    ) -> None:
        """values: of every node, for two rows of inputs; others: the same with another second row."""
        assert captured.time is not None
        self.captured, self.level, self.values, self.constants = captured, level, dict(values), constants
        self.others = others
        self.time: sympy.Symbol = captured.time
        self.order = {node: i for i, node in enumerate(captured.nodes)}
        self.inner: dict[Node, dict[int, int]] = {}
        self.unknown: set[Node] = set()  # values whose positions are not in any order that could be found
        self.solutions: dict[tuple[Node, Roles], Solution] = {}
        self.cuts: dict[Node, int] = {}  # cut node → its time axis
        self._fresh: dict[tuple[Node, int], Any] = {}
        self._rows: dict[Node, Rows | None] = {}
        self._probed: set[Node] = set()  # attentions that are being asked
        self.sizes = {  # of each symbol in the values
            size.node.expr: values[node].shape[axis]
            for node in captured.inputs.values()
            for axis, size in enumerate(meta(node).shape)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
        }
        self._find_layouts()

    # -- axes -----------------------------------------------------------------------------------------------------

    def time_axes(self, node: Node) -> list[int]:
        """Axes whose size mentions the time symbol; of a list-valued node, those of its first tensor."""
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

    def _find_layouts(self) -> None:
        """An axis of size k·time (batch and time flattened, say) holds time at some stride: find which, operation by
        operation, as the stride at which the operation commutes with restriction."""
        for node in self.captured.nodes:
            if self.level[node] == Level.CONSTANT or node.op != "call_function":
                continue
            for axis in self.time_axes(node):
                if not self.is_exact(node, axis):
                    size = _first(self.values[node]).shape[axis] // LENGTH
                    strides = [k for k in range(1, size + 1) if size % k == 0]
                    if not self._find_stride(node, axis, strides):
                        self.unknown.add(node)

    def _find_stride(self, node: Node, axis: int, strides: list[int]) -> bool:
        if _first(self.values[node]).shape[axis] % LENGTH:
            return False
        for stride in strides:
            self.inner.setdefault(node, {})[axis] = stride
            if self._search((node,), self.roles(node), (NEW,)) is not None:
                return True
        return False

    def restrict(self, node: Node, roles: Roles, window: tuple[int, int]) -> Any:
        """The node's value, narrowed on its time axes."""
        first, count = window
        value = self.values[node]
        tensors = value if isinstance(value, (list, tuple)) else [value]
        restricted = []
        for tensor in tensors:
            for axis, role in roles:
                if axis >= tensor.dim():  # what an operation returns beside its result, such as statistics
                    continue
                stride = self.inner.get(node, {}).get(axis, 1)
                start, size = (first, count) if role == NEW else (0, first + count)
                split = tensor.unflatten(axis, (-1, LENGTH, stride)).narrow(axis + 1, start, size)
                tensor = split.flatten(axis, axis + 2)
            restricted.append(tensor.contiguous())
        return restricted if isinstance(value, (list, tuple)) else restricted[0]

    # -- search ---------------------------------------------------------------------------------------------------

    def solve(self, node: Node, roles: Roles) -> Solution:
        """The choice of operands that computes `node` in these roles, by itself or, if it cannot be, together with the
        smallest region before it that can; UnsupportedModelError if there is none."""
        key = node, roles
        if key not in self.solutions:
            found = None if self._needs_its_list(node, roles) else self._search((node,), roles, (NEW, ALL))
            for region in closing_regions(node, self.level, self.order, self._is_apart) if found is None else ():
                found = self._search(region, roles, (NEW, ALL))
                if found is not None:
                    break
            if found is None:
                ahead = all(role == NEW for _, role in roles) and self._looks_ahead(node, roles)
                raise UnsupportedModelError(why_not(self, node, ahead))
            self.solutions[key] = found
        return self.solutions[key]

    def _needs_its_list(self, node: Node, roles: Roles) -> bool:
        """Whether a node takes one of several values of an operation that keeps positions apart in this one alone, as
        the greatest value of a row does and the place where it stands does not."""
        if node.target is not operator.getitem or self.level[node] != Level.STEP:
            return False
        several = node.all_input_nodes[0]
        try:
            self.solve(several, self.roles(several) if len(self.time_axes(several)) != len(roles) else roles)
        except UnsupportedModelError:
            return True
        return False

    def _is_apart(self, node: Node) -> bool:
        """Whether a value has its positions on axes of their own, or in a layout that is known."""
        if self.level[node] == Level.CONSTANT:
            return all(self.is_exact(node, axis) for axis in self.time_axes(node))
        return bool(self.time_axes(node)) and node not in self.unknown

    def _search(
        self,
        nodes: tuple[Node, ...],
        roles: Roles,
        allowed: tuple[str, ...],
        windows: tuple[tuple[int, int], ...] = WINDOWS,
    ) -> Solution | None:
        """The first choice of operands with which the last of `nodes` commutes, those with the fewest ALL first."""
        if nodes[0].target is ATTENTION and nodes[0] not in self._probed:
            with self._even_attention(nodes[0]):
                return self._search(nodes, roles, allowed, windows)
        leaves = tuple(tuple(pytree.tree_leaves((node.args, node.kwargs))) for node in nodes)
        inside = frozenset(nodes)
        options = [[self._options(leaf, allowed, inside) for leaf in part] for part in leaves]
        if any(choices == [] for part in options for choices in part):
            return None
        slots = [(p, i) for p, part in enumerate(options) for i, choices in enumerate(part) if len(choices) > 1]
        # One value may be read twice, as the new rows and as all of them. In a large region it is read in one way.
        tied = len(slots) > MOST_AXES and len(nodes) > 1
        groups: dict[Any, list[tuple[int, int]]] = {}
        for p, i in slots:
            groups.setdefault(leaves[p][i] if tied else (p, i), []).append((p, i))
        free = [options[where[0][0]][where[0][1]] for where in groups.values()]
        if len(free) > MOST_AXES:
            free = [[o[0], o[-1]] if at < MOST_AXES else o[:1] for at, o in enumerate(free)]
        combinations: Iterable[tuple[Choice, ...]] = itertools.product(*free)
        if len(nodes) > 1 and math.prod(map(len, free)) > MOST_OF_REGION:
            combinations = [tuple(o[0] for o in free), tuple(o[-1] if FRESH in o else o[0] for o in free)]

        def weight(chosen: tuple[Choice, ...]) -> int:
            return sum(role == ALL for c in chosen if isinstance(c, tuple) for _, role in c)

        choices = [[o[0] for o in part] for part in options]
        for chosen in sorted(combinations, key=weight):
            for where, choice in zip(groups.values(), chosen, strict=True):
                for p, i in where:
                    choices[p][i] = choice
            solution = Solution(nodes, tuple(map(tuple, choices)))
            if all(self._commutes(solution, roles, window) for window in windows):
                return solution
        return None

    @contextmanager
    def _even_attention(self, node: Node) -> Iterator[None]:
        """For a while the attention's operands are small random numbers: where its scores are so far apart that it
        attends to one position alone, it would seem to need no other."""
        operands = [a for a in node.args[:3] if isinstance(a, Node)]
        before = {n: self.values[n] for n in (node, *operands)}
        generator = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(before[n].shape, generator=generator, dtype=before[n].dtype) for n in operands}
        self.values |= drawn
        self.values[node] = call(node, self.values.__getitem__)
        self._probed.add(node)
        try:
            yield
        finally:
            self._probed.discard(node)
            self.values |= before

    def _options(self, leaf: Any, allowed: tuple[str, ...], inside: frozenset[Node]) -> list[Choice]:
        """The ways in which an operand can be given; none for a value whose positions cannot be told apart."""
        if not isinstance(leaf, Node) or leaf in inside:
            return [None]
        if leaf in self.unknown or is_counted(leaf):
            return []
        if self.is_timed_size(leaf):
            return [((0, role),) for role in allowed]
        axes = self.time_axes(leaf)
        if not axes:
            return [None]
        per_axis: list[Choice] = [
            tuple(zip(axes, roles, strict=True)) for roles in itertools.product(allowed, repeat=len(axes))
        ]
        if self.level[leaf] == Level.CONSTANT:
            return [*per_axis, FRESH] if all(self.is_exact(leaf, a) for a in axes) else [FRESH]
        return [ONE, *per_axis] if self.level[leaf] == Level.REQUEST else per_axis

    def _commutes(self, solution: Solution, roles: Roles, window: tuple[int, int]) -> bool:
        found: dict[Node, Any] = {}
        try:
            with torch.no_grad():
                for node, choices in solution.parts:
                    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
                    operands = [
                        found[leaf] if isinstance(leaf, Node) and leaf in found else self._operand(leaf, choice, window)
                        for leaf, choice in zip(leaves, choices, strict=True)
                    ]
                    args, kwargs = pytree.tree_unflatten(operands, spec)
                    found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError):  # sizes that do not fit each other: not these roles
            return False
        exit = solution.nodes[-1]
        return _alike(found[exit], self.restrict(exit, roles, window))

    def _operand(self, leaf: Any, choice: Choice, window: tuple[int, int]) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        if isinstance(meta(leaf), torch.SymInt):
            if not isinstance(choice, tuple):
                return self.values[leaf]
            ((_, role),) = choice
            return self.size(leaf, window[1] if role == NEW else sum(window))
        if choice is None:
            return self.values[leaf]
        if choice == ONE:
            value = self.values[leaf]
            for axis in self.time_axes(leaf):
                value = value.narrow(axis, 0, 1)
            return value
        if choice == FRESH:
            return self.fresh(leaf, window[1])
        return self.restrict(leaf, choice, window)  # type: ignore[arg-type]

    def size(self, node: Node, time: int) -> int:
        """A traced size with `time` positions and the other symbols as in the values."""
        return int(expression(meta(node)).subs({**self.sizes, self.time: time}))

    def fresh(self, node: Node, time: int) -> Any:
        """A constant computed for another number of positions."""
        key = node, time
        if key not in self._fresh:
            try:
                self._fresh[key] = self.constants.at([node], {**self.sizes, self.time: time})[node]
            except (RuntimeError, IndexError) as error:
                raise RuntimeError("cannot be computed at this size") from error
        return self._fresh[key]

    def _looks_ahead(self, node: Node, roles: Roles) -> bool:
        """Whether it commutes at least at the windows that end with the last position."""
        last = tuple(w for w in WINDOWS if sum(w) == LENGTH)
        return self._search((node,), roles, (NEW, ALL), last) is not None

    # -- cut points -----------------------------------------------------------------------------------------------

    def cut(self, node: Node) -> Node:
        """Where the value whose ALL view is needed is held: the node itself, or, above operations that only repeat
        numbers, the nearest one that holds each number once and has one plain time axis."""
        best, here = node, node
        while (above := self.moved_from(here)) is not None:
            here = above
            if self._can_hold(here) and (
                not self._can_hold(best) or self.values[here].numel() < self.values[best].numel()
            ):
                best = here
        if not self._can_hold(best):
            raise UnsupportedModelError(
                f"`{node.target}` at {source_line(node)} needs the past of a value whose batch or time axis is "
                "merged with another in a way that cannot be told apart; keep batch and time as axes of their own"
            )
        self.cuts[best] = self.time_axes(best)[0]
        return best

    def _can_hold(self, node: Node) -> bool:
        axes = self.time_axes(node)
        return len(axes) == 1 and self.is_exact(node, axes[0]) and self.rows(node) is not None

    def rows(self, node: Node) -> Rows | None:
        """Where the value has the rows of the batch, if that can be told."""
        if node not in self._rows:
            value = self.values[node]
            found = isinstance(value, torch.Tensor) and find_rows(self.captured, node, value, self.others[node])
            self._rows[node] = found or None
        return self._rows[node]

    def batch_axis(self, node: Node) -> int | None:
        """The axis whose size is the batch's, if there is just one."""
        found = [a for a, size in enumerate(meta(node).shape) if expression(size) in self.captured.batch]
        return found[0] if len(found) == 1 else None

    def moved_from(self, node: Node) -> Node | None:
        """The node's operand, if all that the node does is to rearrange or repeat it."""
        tensors = [a for a in node.all_input_nodes if isinstance(meta(a), torch.Tensor)]
        if len(tensors) != 1 or not isinstance(meta(node), torch.Tensor) or self.level[tensors[0]] != self.level[node]:
            return None
        source = self.values[tensors[0]]
        if not isinstance(source, torch.Tensor) or source.numel() > self.values[node].numel():
            return None
        dtype = source.dtype if source.is_floating_point() else torch.int64  # booleans cannot be told apart
        marked = torch.arange(1, source.numel() + 1, dtype=torch.float64).reshape(source.shape).to(dtype)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        operands = [marked if x is tensors[0] else self.values[x] if isinstance(x, Node) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(operands, spec)
        try:
            moved = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError):
            return None
        same = moved.dtype == marked.dtype and torch.isin(moved, marked).all() and torch.isin(marked, moved).all()
        return tensors[0] if same else None


def _first(value: Any) -> Any:
    """Of what is a list of tensors, the first."""
    return value[0] if isinstance(value, (list, tuple)) else value


def _alike(result: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(result) == len(expected) and all(map(_alike, result, expected))
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        return False
    if not result.is_floating_point():
        return torch.equal(result, expected)
    finite = expected.isfinite()
    if not torch.equal(
        torch.where(finite, 0.0, expected.nan_to_num(2.0)), torch.where(finite, 0.0, result.nan_to_num(2.0))
    ):
        return False
    scale = torch.where(finite & (expected.abs() < 1e30), expected, 0.0).abs().max() if expected.numel() else 0.0
    return bool(torch.allclose(result[finite], expected[finite], rtol=RELATIVE, atol=float(RELATIVE * scale)))
