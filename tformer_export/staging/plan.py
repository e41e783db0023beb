"""What the decode program computes, and what it needs from outside: caches, context and tables.

Demands travel backwards from the output: each says in which roles of its time axes a value is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.binding_time import Level, is_fixed
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import aten, meta
from tformer_export.staging.restriction import ALL, FRESH, NEW, ONE, Choice, Roles, Views


@dataclass(frozen=True)
class CachedAttention:
    """An attention over the step input's own past. key and value are held once for each of `groups` heads."""

    node: Node
    key: Node
    value: Node
    groups: int
    bias: Node | None


Fits = Callable[[CachedAttention], bool]


@dataclass
class Plan:
    """demands: value → the roles it is wanted in, for values computed in decode. contexts: (value, whether for one
    position). tables: constants gathered by position. still: constants that are made from the length and must be the
    same at any. fused: attentions that keep their own caches. select: the value from which on only the wanted positions
    are computed; None if they are taken at the end."""

    demands: dict[Node, list[Roles]] = field(default_factory=dict)
    contexts: dict[tuple[Node, bool], None] = field(default_factory=dict)
    tables: dict[Node, None] = field(default_factory=dict)
    still: dict[Node, None] = field(default_factory=dict)
    fused: dict[Node, CachedAttention] = field(default_factory=dict)
    select: Node | None = None


def make_plan(captured: Captured, level: Mapping[Node, Level], views: Views, fits: Fits) -> Plan:
    """`fits` says whether the target has a fused operator for an attention. One pass over the graph, backwards."""
    plan = Plan()

    def demand(node: Node, choice: Choice) -> None:
        if isinstance(meta(node), torch.SymInt):
            return
        timed = bool(views.time_axes(node))
        if level[node] == Level.CONSTANT:
            if timed and choice != FRESH:
                plan.tables[node] = None
            elif not timed and isinstance(meta(node), torch.Tensor) and not is_fixed(node):
                plan.still[node] = None
        elif level[node] == Level.REQUEST and not (timed and isinstance(choice, tuple)):
            plan.contexts[node, choice == ONE] = None
        else:
            roles = choice if isinstance(choice, tuple) else ()
            wanted = plan.demands.setdefault(node, [])
            if roles not in wanted:
                wanted.append(roles)

    demand(captured.output, views.roles(captured.output))
    for extra in captured.extras.values():
        if level[extra] == Level.STEP:
            demand(extra, views.roles(extra))
    for node in reversed(captured.nodes):
        for roles in plan.demands.get(node, ()):
            if node is captured.step and all(role == NEW for _, role in roles):
                continue
            past = len(roles) == 1 and roles[0][1] == ALL and level[node] == Level.STEP
            if past and views.cut(node) is node:
                demand(node, views.roles(node))
                continue
            solution = views.solve(node, roles)
            alone = node.target is ATTENTION and len(solution.nodes) == 1
            cached = _cached_attention(views, level, node, solution.choices[0]) if alone else None
            if cached is not None and fits(cached):
                plan.fused[node] = cached
                for operand in (node.args[0], cached.key, cached.value):
                    demand(operand, views.roles(operand))  # type: ignore[arg-type]
                if cached.bias is not None:
                    demand(cached.bias, solution.choices[0][3])
                continue
            for operand, choice in solution.operands():
                demand(operand, choice)
    plan.select = _select(captured, plan, views)
    return plan


def _cached_attention(
    views: Views, level: Mapping[Node, Level], node: Node, choices: tuple[Choice, ...]
) -> CachedAttention | None:
    """The attention's operands before their heads were repeated, if its keys and values come from the step input."""
    _, key, value, bias = node.args[:4]
    assert isinstance(key, Node)
    assert isinstance(value, Node)
    if level[key] != Level.STEP or level[value] != Level.STEP:
        return None
    if choices[1] != ((2, ALL),) or choices[2] != ((2, ALL),):
        return None
    unique = [_unrepeated(views, n) for n in (key, value)]
    if meta(unique[0]).shape[1] != meta(unique[1]).shape[1]:
        unique = [key, value]
    return CachedAttention(node, unique[0], unique[1], int(meta(unique[0]).shape[1]), bias)  # type: ignore[arg-type]


def _unrepeated(views: Views, node: Node) -> Node:
    """The value of which `node` repeats each head a number of times in a row, or `node`."""
    best, here = node, node
    while (above := views.moved_from(here)) is not None:
        here = above
        source, repeated = views.values[here], views.values[node]
        if source.dim() == 4 and views.time_axes(here) == [2] and repeated.shape[1] % source.shape[1] == 0:
            again = source.repeat_interleave(repeated.shape[1] // source.shape[1], 1)
            if again.shape == repeated.shape and torch.equal(again, repeated):
                best = here
    return best


def _select(captured: Captured, plan: Plan, views: Views) -> Node | None:
    """The first value after all attention through which everything later flows: unwanted rows can be dropped there.

    Unless something beside the output is asked for, the output itself is such a value.
    """
    order = {node: i for i, node in enumerate(captured.nodes)}
    computed = [n for n in captured.nodes if n in plan.demands]
    past_needed = [
        n
        for n in computed
        if n.target is ATTENTION or any(role == ALL for roles in plan.demands[n] for _, role in roles)
    ]
    first = max((order[n] for n in past_needed), default=-1)
    last_use = {n: max((order[u] for u in n.users if u in plan.demands), default=-1) for n in computed}
    reach = -1
    for node in computed:
        here = order[node]
        if here >= first and reach <= here and _is_row_value(views, node) and node is not captured.step:
            return node
        reach = max(reach, last_use[node])
    return None


def _is_row_value(views: Views, node: Node) -> bool:
    value, axes = meta(node), views.time_axes(node)
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and len(axes) == 1
        and views.is_exact(node, axes[0])
        and views.batch_axis(node) is not None
        and node.target is not aten.sym_size.int
    )
