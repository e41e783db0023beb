"""Why an operation cannot be decoded step by step, in words: what it does to positions is found by disturbing one.

Each operation is run again with one position of its operands changed. If a result before that position moves, it looks
ahead; if only later ones do, it carries something from position to position in a way that is not attention's.
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
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import is_counted, meta, named, operation, source_line

RUN_ONCE = "export the model without a step input (step=None) to run it once per input"
LONGEST_WAY = 12  # operations between a value with other rows and one with the positions' rows again


class Layouts(Protocol):
    """What `restriction.Views` has found of where positions stand, as far as it is told here."""

    captured: Captured
    level: Mapping[Node, Level]
    values: dict[Node, Any]
    sizes: dict[Any, int]
    time: sympy.Symbol
    inner: dict[Node, dict[int, int]]
    unknown: set[Node]

    def time_axes(self, node: Node) -> list[int]: ...

    def is_exact(self, node: Node, axis: int) -> bool: ...


def why_not(layouts: Layouts, node: Node, looks_ahead: bool) -> str:
    """One sentence or two for an operation that keeps positions apart in no way. looks_ahead: what else says so."""
    for read in (node, *node.all_input_nodes):
        if is_counted(read):
            return (
                f"forward reads a number out of the step input's data into Python, at {source_line(read)}. It follows "
                "from all positions at once, while a step knows only those so far: compute it for each position, as a "
                "tensor"
            )
    misfits = [n for n in node.all_input_nodes if _misfit(layouts, n)]
    while above := [n for n in (misfits[0].all_input_nodes if misfits else ()) if _misfit(layouts, n)]:
        misfits = above
    if misfits:
        return _shifted(layouts, misfits[0])
    first = _first(meta(node))
    if isinstance(first, torch.Tensor) and any(free_unbacked_symbols(size) for size in first.shape):
        return (
            f"{named(node)} makes a tensor whose size depends on the data, so its rows no longer belong to positions. "
            "Keep a row for every position and hide what is not wanted, by torch.where, masked_fill or a mask"
        )
    if not _alike(call(node, lambda n: layouts.values[n]), layouts.values[node]):
        return (
            f"{named(node)} gives something else each time it runs, so it cannot be decoded step by step. Leave it out "
            "outside training, or draw its numbers once in __init__ and keep them as a buffer"
        )
    moves = _moves(layouts, node, node) or ({"ahead"} if looks_ahead else set())
    if "ahead" in moves or (looks_ahead and node.target is ATTENTION):
        hint = "Give it" if node.target is ATTENTION else "If this is attention, give it"
        return (
            f"{named(node)} looks ahead: its value at a position depends on later positions of the step input, so it "
            f"cannot be decoded step by step. {hint} a causal mask; if the model is to see the whole sequence, "
            f"{RUN_ONCE}"
        )
    if "back" in moves:
        return f"{named(node)} {_CARRIES} its value at a position is made from earlier ones. {_ONLY_ATTENTION}"
    return (
        f"{named(node)} mixes different positions of the step input outside attention, so it cannot be decoded step by "
        f"step with a key-value cache; {RUN_ONCE}"
    )


_CARRIES = "carries state from position to position outside attention:"
_ONLY_ATTENTION = (
    "Only what attention reads of earlier positions can be cached, so put attention in its place, or " + RUN_ONCE
)


def _first(value: Any) -> Any:
    """Of several tensors, the first."""
    return value[0] if isinstance(value, (list, tuple)) else value


def _misfit(layouts: Layouts, node: Node) -> bool:
    """Whether an axis has rows that are no multiple of the positions."""
    value = _first(layouts.values[node])
    return node in layouts.unknown and any(
        value.shape[axis] % layouts.sizes[layouts.time] for axis in layouts.time_axes(node)
    )


def _shifted(layouts: Layouts, node: Node) -> str:
    """For a value that has other rows than positions: what becomes of it where it has a row for each again."""
    size = str(_first(meta(node)).shape[layouts.time_axes(node)[0]]).replace(str(layouts.time), "time")
    what = f"{named(node)} has {size} rows where the step input has time"
    above, below = _nearest(layouts, node, up=True), _nearest(layouts, node, up=False)
    if above is not None and below is not None:
        moves = _moves(layouts, above, below)
        then = named(below) if source_line(below) != source_line(node) else operation(below)
        if moves == {"back"}:
            return (
                f"{what}, and {then} {_CARRIES} its value at a position is made from a few earlier ones, as in a "
                f"convolution over time. {_ONLY_ATTENTION}"
            )
        if moves:
            return (
                f"{what}, and {then} looks ahead: its value at a position depends on later positions of the step "
                f"input, so it cannot be decoded step by step; {RUN_ONCE}"
            )
    return f"{what}: positions are put in front, dropped or shifted inside the model; do that to its inputs instead"


def _nearest(layouts: Layouts, node: Node, up: bool) -> Node | None:
    """The nearest value of the step, above or below, that has one axis of exactly the positions."""
    todo = [node]
    for _ in range(LONGEST_WAY):
        todo = [n for here in todo for n in (here.all_input_nodes if up else here.users)]
        for found in todo:
            axes = layouts.time_axes(found) if isinstance(meta(found), torch.Tensor) else []
            if layouts.level[found] == Level.STEP and len(axes) == 1 and layouts.is_exact(found, axes[0]):
                return found
    return None


def _moves(layouts: Layouts, source: Node, result: Node) -> set[str]:
    """Whether values of `result` move "ahead" of (before) a disturbed position, or "back" (after it).

    Disturbed are the operands of `source` if it is the result itself, else the value `source`. Empty if it cannot be
    told: the operands have no single time axis, or the operations fail on other values.
    """
    disturbed = [
        n
        for n in (source.all_input_nodes if source is result else [source])
        if isinstance(meta(n), torch.Tensor) and layouts.level[n] == Level.STEP and len(layouts.time_axes(n)) == 1
    ]
    axes = layouts.time_axes(result)
    if not disturbed or len(axes) != 1 or not isinstance(layouts.values[result], torch.Tensor):
        return set()
    between = _between(layouts, disturbed, result)
    found = set()
    try:
        before = _by_position(layouts, result, axes[0], layouts.values[result])
        for position in range(1, before.shape[0] - 1):
            values = {n: _disturb(layouts, n, position) for n in disturbed}
            with torch.no_grad():
                for node in between:
                    values[node] = call(node, lambda n, known=values: known.get(n, layouts.values.get(n)))  # type: ignore[misc]
            after = _by_position(layouts, result, axes[0], values[result])
            moved = [
                i
                for i in range(len(before))
                if not torch.allclose(before[i].double(), after[i].double(), 1e-4, 1e-5, True)
            ]
            found |= {"ahead" for i in moved if i < position} | {"back" for i in moved if i > position}
    except (RuntimeError, IndexError, TypeError):
        return set()
    return found


def _between(layouts: Layouts, sources: list[Node], result: Node) -> list[Node]:
    """What has to be computed anew, in order, if the sources change."""
    changed = set(sources)
    order = []
    for node in layouts.captured.nodes:
        if node not in changed and node.op == "call_function" and any(a in changed for a in node.all_input_nodes):
            changed.add(node)
            order.append(node)
        if node is result:
            break
    return order


def _by_position(layouts: Layouts, node: Node, axis: int, value: torch.Tensor) -> torch.Tensor:
    """(positions, …): the value by its axis of positions, which may be strided; shares memory if it is contiguous."""
    length = layouts.sizes[layouts.time]
    stride = layouts.inner.get(node, {}).get(axis, 1)
    size = value.shape[axis] // (length * stride)
    before, after = value.shape[:axis], value.shape[axis + 1 :]
    return value.reshape(*before, size, length, stride, *after).movedim(axis + 1, 0)


def _disturb(layouts: Layouts, node: Node, position: int) -> torch.Tensor:
    """The node's value with one position replaced: by other numbers, or by another position's ids or answers."""
    value: torch.Tensor = layouts.values[node].clone(memory_format=torch.contiguous_format)
    rows = _by_position(layouts, node, layouts.time_axes(node)[0], value)
    if value.is_floating_point():
        generator = torch.Generator().manual_seed(position)
        rows[position] += torch.randn(rows[position].shape, generator=generator).to(value.dtype)
    else:
        rows[position] = ~rows[position] if value.dtype == torch.bool else rows[position - 1].clone()
    return value


def _alike(one: Any, other: Any) -> bool:
    """Whether an operation gave the same twice; what is not a tensor is not asked."""
    pairs = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-5, True)
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )
