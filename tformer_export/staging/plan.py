"""The plan of the decode program: the values that it computes, and the caches, contexts and tables that it needs.

Demands travel backwards from the output. A demand says in which roles of its time axes a value is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.binding_time import Level, is_fixed, values_of_adapters
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, meta
from tformer_export.staging.restriction import (
    ALL,
    ARANGE,
    BROADCAST,
    LOOKBACK_ROWS,
    NEW,
    AxisChoice,
    RestrictionSolver,
    Roles,
    Solution,
)


@dataclass(frozen=True)
class CachedAttention:
    """An attention over the step input's own past.

    key, value: before heads are repeated.
    """

    node: Node
    key: Node
    value: Node
    bias: Node | None


HasOperator = Callable[[CachedAttention], bool]  # whether the target has a fused operator for an attention


@dataclass
class StagingPlan:
    """The plan of the decode program.

    demands: value that decode computes → the roles in which it is needed.
    of_adapters: values that decode computes of the numbers of the rows' adapters, which it has as an input.
    contexts: (value of the request, whether it is needed for one position only).
    tables: constants that are gathered by position.
    length_invariant: constants that depend on the length and must be the same at any length.
    fused: attentions that update their own caches.
    looking_back: values that follow from earlier positions in another way than by attention.
    select: the value at which decode drops the positions whose logits the caller does not request, such as the hidden
        states after the last attention. All later operations run on the remaining positions. None if decode computes
        all positions and drops some of its outputs.
    """

    demands: dict[Node, list[Roles]] = field(default_factory=dict)
    of_adapters: set[Node] = field(default_factory=set)
    contexts: dict[tuple[Node, bool], None] = field(default_factory=dict)
    tables: dict[Node, None] = field(default_factory=dict)
    length_invariant: dict[Node, None] = field(default_factory=dict)
    fused: dict[Node, CachedAttention] = field(default_factory=dict)
    looking_back: set[Node] = field(default_factory=set)
    select: Node | None = None


def make_plan(
    captured: CapturedGraph, level: Mapping[Node, Level], solver: RestrictionSolver, has_operator: HasOperator
) -> StagingPlan:
    """Plan the decode stage, in one pass over the graph, backwards."""
    planner = _Planner(captured, level, solver, has_operator)
    planner.demand(captured.output, solver.roles(captured.output))
    for extra in captured.extras.values():
        if level[extra] == Level.STEP:
            planner.demand(extra, solver.roles(extra))
    for node in reversed(captured.nodes):
        for roles in planner.plan.demands.get(node, ()):
            planner.compute(node, roles)
    planner.plan.select = planner.select()
    return planner.plan


class _Planner:
    """A plan in the making.

    last_use: the place of the last operation that reads a value. A region reads at its end.
    """

    def __init__(
        self, captured: CapturedGraph, level: Mapping[Node, Level], solver: RestrictionSolver, has_operator: HasOperator
    ) -> None:
        self.captured, self.level, self.solver, self.has_operator = captured, level, solver, has_operator
        self.plan = StagingPlan(of_adapters=values_of_adapters(captured, level))
        self.order = {node: i for i, node in enumerate(captured.nodes)}
        self.last_use: dict[Node, int] = {}

    # -- demands of operands --------------------------------------------------------------------------------------

    def demand(self, node: Node, choice: AxisChoice, user: Node | None = None) -> None:
        """Note that an operand is needed, in the form of the choice, by the operation `user`."""
        if isinstance(meta(node), torch.SymInt):
            return
        if user is not None:
            self.last_use[node] = max(self.last_use.get(node, -1), self.order[user])
        level = self.level[node]
        if node in self.plan.of_adapters:
            return
        if choice == LOOKBACK_ROWS and level != Level.STEP:
            choice = ARANGE if level == Level.CONSTANT else None
        has_rows = isinstance(choice, tuple) and bool(self.solver.time_axes(node))
        if level == Level.CONSTANT:
            self._demand_constant(node, choice)
        elif level == Level.REQUEST and not has_rows:
            self.plan.contexts[node, choice == BROADCAST] = None
        else:
            demanded_roles = self.plan.demands.setdefault(node, [])
            roles = choice if isinstance(choice, tuple) else ()
            if roles not in demanded_roles:
                demanded_roles.append(roles)

    def _demand_constant(self, node: Node, choice: AxisChoice) -> None:
        """Note a constant that is read at positions, or whose value may change with the length."""
        if choice == ARANGE:
            return
        if self.solver.time_axes(node):
            self.plan.tables[node] = None
        elif isinstance(meta(node), torch.Tensor) and not is_fixed(node):
            self.plan.length_invariant[node] = None

    # -- operations -----------------------------------------------------------------------------------------------

    def compute(self, node: Node, roles: Roles) -> None:
        """Demand all that computes a value in these roles."""
        if node is self.captured.step and all(role == NEW for _, role in roles):
            return
        if self._is_read_from_cache(node, roles):
            self.demand(node, self.solver.roles(node))  # its new rows, which are written into the cache
            return
        solution = self.solver.solve(node, roles)
        if (cached := self._fused_attention(node, solution)) is not None:
            self._compute_fused(cached, solution)
            return
        if solution.lookback is not None or solution.recurrence is not None:
            self.plan.looking_back.add(node)
        for operand, choice in solution.operands():
            if choice == LOOKBACK_ROWS and self.level[operand] == Level.STEP:
                choice = self._rows_of_span(operand, solution)
            self.demand(operand, choice, node)

    def _is_read_from_cache(self, node: Node, roles: Roles) -> bool:
        is_past_needed = len(roles) == 1 and roles[0][1] == ALL and self.level[node] == Level.STEP
        return is_past_needed and self.solver.cut(node) is node

    def _fused_attention(self, node: Node, solution: Solution) -> CachedAttention | None:
        """Return the attention that an operator of the target computes with its caches, if there is one."""
        if node.target is not ATTENTION or len(solution.nodes) != 1:
            return None
        cached = _cached_attention(self.solver, self.level, node, solution.choices[0])
        return cached if cached is not None and self.has_operator(cached) else None

    def _compute_fused(self, cached: CachedAttention, solution: Solution) -> None:
        """Demand the new rows of the operands. The operator has the caches."""
        node = cached.node
        self.plan.fused[node] = cached
        for operand in (arguments(node)[0], cached.key, cached.value):
            self.demand(operand, self.solver.roles(operand), node)
        if cached.bias is not None:
            self.demand(cached.bias, solution.choices[0][3], node)

    def _rows_of_span(self, operand: Node, solution: Solution) -> Roles:
        """Return the rows of an operand of a region that looks back: the new ones, or all if there is no limit."""
        assert solution.lookback is not None
        return self.solver.roles(operand, ALL if solution.lookback.rows is None else NEW)

    # -- selected positions ---------------------------------------------------------------------------------------

    def select(self) -> Node | None:
        """Return the first value after all attention through which all later values flow.

        Unwanted rows can be dropped there. Without extra outputs the model's output is such a value.
        """
        computed = [n for n in self.captured.nodes if n in self.plan.demands]
        first = max((self.order[n] for n in computed if self._reads_the_past(n)), default=-1)
        reach = -1
        for node in computed:
            position = self.order[node]
            is_passed_by_none = position >= first and reach <= position
            if is_passed_by_none and _is_row_value(self.solver, node) and node is not self.captured.step:
                return node
            reach = max(reach, self.last_use.get(node, -1))
        return None

    def _reads_the_past(self, node: Node) -> bool:
        return (
            node.target is ATTENTION
            or node in self.plan.looking_back
            or any(role == ALL for roles in self.plan.demands[node] for _, role in roles)
        )


def _cached_attention(
    solver: RestrictionSolver, level: Mapping[Node, Level], node: Node, choices: tuple[AxisChoice, ...]
) -> CachedAttention | None:
    """Return the attention over its operands before their heads were repeated.

    Return None unless its keys and values come from the step input.
    """
    _, key, value, bias = node.args[:4]
    assert isinstance(key, Node)
    assert isinstance(value, Node)
    if level[key] != Level.STEP or level[value] != Level.STEP:
        return None
    if choices[1] != ((2, ALL),) or choices[2] != ((2, ALL),):
        return None
    if any(not solver.is_exact(n, 2) for n in (node, key, value)):  # the operator writes a slot for each new row
        return None
    if solver.free_axes(key) or solver.free_axes(value):  # they cannot be cached
        return None
    unique = [_unrepeated(solver, n) for n in (key, value)]
    if meta(unique[0]).shape[1] != meta(unique[1]).shape[1]:
        unique = [key, value]
    return CachedAttention(node, unique[0], unique[1], bias)  # type: ignore[arg-type]


def _unrepeated(solver: RestrictionSolver, node: Node) -> Node:
    """Return the value of which `node` repeats each head several times in a row; `node` if there is none."""
    best, current = node, node
    while (above := solver.rearranged_operand(current)) is not None:
        current = above
        source, repeated = solver.values[current], solver.values[node]
        if source.dim() == 4 and solver.time_axes(current) == [2] and repeated.shape[1] % source.shape[1] == 0:
            repeated_source = source.repeat_interleave(repeated.shape[1] // source.shape[1], 1)
            if repeated_source.shape == repeated.shape and torch.equal(repeated_source, repeated):
                best = current
    return best


def _is_row_value(solver: RestrictionSolver, node: Node) -> bool:
    value, axes = meta(node), solver.time_axes(node)
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and len(axes) == 1
        and solver.is_exact(node, axes[0])
        and solver.batch_axis(node) is not None
        and node.target is not aten.sym_size.int
    )
