"""Messages why an operation cannot be decoded step by step.

The effect of an operation on positions is found by changing one. The operation runs again with one position of its
operands changed. If a result before that position changes, it looks ahead. If only later results change, it carries
values from position to position in another way than attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.binding_time import Level
from tformer_export.analysis.interpreter import call
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import (
    describe_node,
    expression,
    is_read_from_data,
    meta,
    operation_name,
    source_line,
)
from tformer_export.common.source_lines import size_words
from tformer_export.staging.layouts import Layout

SINGLE_PASS_ADVICE = "export the model without a step input (step_input=None) to run it once per input"
MAX_PATH_OPERATIONS = 12  # between a value whose rows are not positions and a value whose rows are


class ValueLayouts(Protocol):
    """The part of `restriction.RestrictionSolver` that the messages need: the layouts of values."""

    captured: CapturedGraph
    level: Mapping[Node, Level]
    values: dict[Node, Any]
    sizes: dict[Any, int]
    time: sympy.Symbol
    unknown_layouts: set[Node]

    def time_axes(self, node: Node) -> list[int]: ...

    def is_exact(self, node: Node, axis: int) -> bool: ...

    def layout(self, node: Node, axis: int) -> Layout: ...


def explain_refusal(layouts: ValueLayouts, node: Node, looks_ahead: bool) -> str:
    """Return one or two sentences about an operation that does not keep positions apart.

    looks_ahead: whether another test has shown that it looks ahead.
    """
    for read in (node, *node.all_input_nodes):
        if is_read_from_data(read):
            return (
                f"forward reads a number out of the step input's data into Python, at {source_line(read)}. It follows "
                "from all positions at once, while a step knows only those so far: compute it for each position, as a "
                "tensor"
            )
    misfits = [n for n in node.all_input_nodes if _has_other_rows(layouts, n)]
    while above := [n for n in (misfits[0].all_input_nodes if misfits else ()) if _has_other_rows(layouts, n)]:
        misfits = above
    if misfits:
        return _explain_other_rows(layouts, misfits[0])
    first = _first(meta(node))
    if isinstance(first, torch.Tensor) and any(free_unbacked_symbols(size) for size in first.shape):
        return (
            f"{describe_node(node)} makes a tensor whose size depends on the data, so its rows no longer belong to "
            "positions. "
            "Keep a row for every position and hide what is not wanted, by torch.where, masked_fill or a mask"
        )
    if not _is_same(call(node, lambda n: layouts.values[n]), layouts.values[node]):
        return (
            f"{describe_node(node)} gives something else each time it runs, so it cannot be decoded step by step. "
            "Leave it out "
            "outside training, or draw its numbers once in __init__ and keep them as a buffer"
        )
    moves = _changed_sides(layouts, node, node) or ({"ahead"} if looks_ahead else set())
    if "ahead" in moves or (looks_ahead and node.target is ATTENTION):
        hint = "Give it" if node.target is ATTENTION else "If this is attention, give it"
        return (
            f"{describe_node(node)} looks ahead: its value at a position depends on later positions of the step "
            "input, so it "
            f"cannot be decoded step by step. {hint} a causal mask; if the model is to see the whole sequence, "
            f"{SINGLE_PASS_ADVICE}"
        )
    if "back" in moves:
        return f"{describe_node(node)} {_CARRIES} its value at a position is made from earlier ones. {_ONLY_ATTENTION}"
    return (
        f"{describe_node(node)} mixes different positions of the step input outside attention, so it cannot be "
        "decoded step by "
        f"step with a key-value cache; {SINGLE_PASS_ADVICE}"
    )


_CARRIES = "carries state from position to position outside attention:"
_ONLY_ATTENTION = (
    "A step reads earlier positions by attention, some positions back or as the state of a loop, so write it in one of "
    "these ways, or " + SINGLE_PASS_ADVICE
)


def _first(value: Any) -> Any:
    """Return the first of several tensors, or the value itself."""
    return value[0] if isinstance(value, (list, tuple)) else value


def _has_other_rows(layouts: ValueLayouts, node: Node) -> bool:
    """Return whether the number of rows on an axis is not a multiple of the number of positions."""
    return node in layouts.unknown_layouts and bool(_other_axes(layouts, node))


def _other_axes(layouts: ValueLayouts, node: Node) -> list[int]:
    """Return the time axes whose number of rows is not a multiple of the number of positions."""
    shape = _first(layouts.values[node]).shape
    return [axis for axis in layouts.time_axes(node) if shape[axis] % layouts.sizes[layouts.time]]


def _explain_other_rows(layouts: ValueLayouts, node: Node) -> str:
    """Return the message for a value whose rows are not positions, by its effect on the next value whose rows are."""
    rows = expression(_first(meta(node)).shape[_other_axes(layouts, node)[0]])
    size = size_words(rows, layouts.captured.size_names)
    if not rows.is_polynomial(layouts.time):
        return (
            f"{describe_node(node)} gives {size} values, a number that changes with the length of the sequence in "
            "another way than its positions, so that its result for a position changes as the sequence grows. Let it "
            f"give one number of values at any length, such as by padding what it reads; or {SINGLE_PASS_ADVICE}"
        )
    reason = f"{describe_node(node)} has {size} rows where the step input has time"
    above, below = _nearest(layouts, node, up=True), _nearest(layouts, node, up=False)
    if above is not None and below is not None:
        moves = _changed_sides(layouts, above, below)
        below_name = describe_node(below) if source_line(below) != source_line(node) else operation_name(below)
        if moves == {"back"}:
            return (
                f"{reason}, and {below_name} {_CARRIES} its value at a position is made from a few earlier ones, as in "
                f"a convolution over time. {_ONLY_ATTENTION}"
            )
        if moves:
            return (
                f"{reason}, and {below_name} looks ahead: its value at a position depends on later positions of the "
                f"step input, so it cannot be decoded step by step; {SINGLE_PASS_ADVICE}"
            )
    return f"{reason}: positions are put in front, dropped or shifted inside the model; do that to its inputs instead"


def _nearest(layouts: ValueLayouts, node: Node, up: bool) -> Node | None:
    """Return the nearest value of the step, above or below, that has one time axis of exactly the positions."""
    frontier = [node]
    for _ in range(MAX_PATH_OPERATIONS):
        frontier = [n for current in frontier for n in (current.all_input_nodes if up else current.users)]
        for candidate in frontier:
            axes = layouts.time_axes(candidate) if isinstance(meta(candidate), torch.Tensor) else []
            if layouts.level[candidate] == Level.STEP and len(axes) == 1 and layouts.is_exact(candidate, axes[0]):
                return candidate
    return None


def _changed_sides(layouts: ValueLayouts, source: Node, result: Node) -> set[str]:
    """Return where values of `result` change if a position changes: "ahead" (before it), "back" (after it).

    The operands of `source` are changed if it is the result itself, otherwise the value `source`. Return an empty set
    if the operands have no single time axis, or if the operations fail on other values.
    """
    changed = [
        n
        for n in (source.all_input_nodes if source is result else [source])
        if isinstance(meta(n), torch.Tensor) and layouts.level[n] == Level.STEP and len(layouts.time_axes(n)) == 1
    ]
    axes = layouts.time_axes(result)
    if not changed or len(axes) != 1 or not isinstance(layouts.values[result], torch.Tensor):
        return set()
    between = _nodes_between(layouts, changed, result)
    sides = set()
    try:
        before = _by_position(layouts, result, axes[0], layouts.values[result])
        for position in range(1, before.shape[0]):
            values = {n: _disturb(layouts, n, position) for n in changed}
            with torch.no_grad():
                for node in between:
                    values[node] = call(node, lambda n, known=values: known.get(n, layouts.values.get(n)))  # type: ignore[misc]
            after = _by_position(layouts, result, axes[0], values[result])
            moved = [
                i
                for i in range(len(before))
                if not torch.allclose(before[i].double(), after[i].double(), 1e-4, 1e-5, True)
            ]
            sides |= {"ahead" for i in moved if i < position} | {"back" for i in moved if i > position}
    except (RuntimeError, IndexError, TypeError):
        return set()
    return sides


def _nodes_between(layouts: ValueLayouts, sources: list[Node], result: Node) -> list[Node]:
    """Return the nodes that have to be computed again, in order, if the sources change."""
    changed = set(sources)
    order = []
    for node in layouts.captured.nodes:
        if node not in changed and node.op == "call_function" and any(a in changed for a in node.all_input_nodes):
            changed.add(node)
            order.append(node)
        if node is result:
            break
    return order


def _by_position(layouts: ValueLayouts, node: Node, axis: int, value: torch.Tensor) -> torch.Tensor:
    """Return a value as (positions, …), by its time axis, which may be strided.

    It shares memory with the value if that is contiguous.
    """
    length = layouts.sizes[layouts.time]
    layout = layouts.layout(node, axis)
    size = value.shape[axis] // (layout.rows(length) * layout.stride)
    before, after = value.shape[:axis], value.shape[axis + 1 :]
    rows = value.reshape(*before, size, layout.rows(length), layout.stride, *after).movedim(axis + 1, 0)
    return rows[layout.front : layout.front + length]


def _disturb(layouts: ValueLayouts, node: Node, position: int) -> torch.Tensor:
    """Return the node's value with one position replaced by other numbers, or by another position's ids or booleans."""
    value: torch.Tensor = layouts.values[node].clone(memory_format=torch.contiguous_format)
    rows = _by_position(layouts, node, layouts.time_axes(node)[0], value)
    if value.is_floating_point():
        generator = torch.Generator().manual_seed(position)
        rows[position] += torch.randn(rows[position].shape, generator=generator).to(value.dtype)
    else:
        rows[position] = ~rows[position] if value.dtype == torch.bool else rows[position - 1].clone()
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two results of an operation are the same. Values other than tensors are ignored."""
    pairs = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-5, True)
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )
