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
from tformer_export.common.fx_nodes import aten, meta
from tformer_export.staging.restriction import ALL, FRESH, NEW, ONE, SPAN, AxisChoice, RestrictionSolver, Roles


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
    plan = StagingPlan(of_adapters=values_of_adapters(captured, level))
    order = {node: i for i, node in enumerate(captured.nodes)}
    last_use: dict[Node, int] = {}  # place of the last operation that reads a value; a region reads at its end

    def demand(node: Node, choice: AxisChoice, user: Node | None = None) -> None:
        """Note that an operand is needed, in the form of the choice, by the operation `user`."""
        if isinstance(meta(node), torch.SymInt):
            return
        if user is not None:
            last_use[node] = max(last_use.get(node, -1), order[user])
        if node in plan.of_adapters:
            return
        if choice == SPAN and level[node] != Level.STEP:
            choice = FRESH if level[node] == Level.CONSTANT else None
        has_time = bool(solver.time_axes(node))
        if level[node] == Level.CONSTANT:
            if has_time and choice != FRESH:
                plan.tables[node] = None
            elif choice != FRESH and not has_time and isinstance(meta(node), torch.Tensor) and not is_fixed(node):
                plan.length_invariant[node] = None
        elif level[node] == Level.REQUEST and not (has_time and isinstance(choice, tuple)):
            plan.contexts[node, choice == ONE] = None
        else:
            roles = choice if isinstance(choice, tuple) else ()
            demanded_roles = plan.demands.setdefault(node, [])
            if roles not in demanded_roles:
                demanded_roles.append(roles)

    demand(captured.output, solver.roles(captured.output))
    for extra in captured.extras.values():
        if level[extra] == Level.STEP:
            demand(extra, solver.roles(extra))
    for node in reversed(captured.nodes):
        for roles in plan.demands.get(node, ()):
            if node is captured.step and all(role == NEW for _, role in roles):
                continue
            is_past_needed = len(roles) == 1 and roles[0][1] == ALL and level[node] == Level.STEP
            if is_past_needed and solver.cut(node) is node:
                demand(node, solver.roles(node))
                continue
            solution = solver.solve(node, roles)
            is_attention = node.target is ATTENTION and len(solution.nodes) == 1
            cached = _cached_attention(solver, level, node, solution.choices[0]) if is_attention else None
            if cached is not None and has_operator(cached):
                plan.fused[node] = cached
                for operand in (node.args[0], cached.key, cached.value):
                    demand(operand, solver.roles(operand), node)  # type: ignore[arg-type]
                if cached.bias is not None:
                    demand(cached.bias, solution.choices[0][3], node)
                continue
            if solution.lookback is not None or solution.recurrence is not None:
                plan.looking_back.add(node)
            for operand, choice in solution.operands():
                if choice == SPAN and level[operand] == Level.STEP:
                    assert solution.lookback is not None
                    choice = solver.roles(operand, ALL if solution.lookback.rows is None else NEW)
                demand(operand, choice, node)
    plan.select = _select(captured, plan, solver, order, last_use)
    return plan


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


def _select(
    captured: CapturedGraph,
    plan: StagingPlan,
    solver: RestrictionSolver,
    order: Mapping[Node, int],
    last_use: Mapping[Node, int],
) -> Node | None:
    """Return the first value after all attention through which all later values flow.

    Unwanted rows can be dropped there. Without extra outputs the model's output is such a value.
    """
    computed = [n for n in captured.nodes if n in plan.demands]
    past_needed = [
        n
        for n in computed
        if n.target is ATTENTION
        or n in plan.looking_back
        or any(role == ALL for roles in plan.demands[n] for _, role in roles)
    ]
    first = max((order[n] for n in past_needed), default=-1)
    reach = -1
    for node in computed:
        position = order[node]
        if position >= first and reach <= position and _is_row_value(solver, node) and node is not captured.step:
            return node
        reach = max(reach, last_use.get(node, -1))
    return None


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
