"""Simpler recordings: readers get written values directly, read numbers are constants, unused operations are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.recording import Constant, InputRef, Place, Recording, Step, StepResult, writes
from tformer_export.common.fx_nodes import aten


def simplify(recordings: Sequence[Recording]) -> list[Recording]:
    """Simplify the recordings of one path of forward. Cost: grows with the number of operations."""
    return [remove_dead_steps(recording) for recording in forward_values(recordings)]


def forward_values(recordings: Sequence[Recording]) -> list[Recording]:
    """Let operations read written values and numbers of the path directly."""
    known = numbers_of_the_path(recordings)
    return [_replace_operands(forward_writes(repeat_equal_rows(recording)), known) for recording in recordings]


def repeat_equal_rows(recording: Recording) -> Recording:
    """Let the rows that forward takes of a cache of its own be copies of one, if all rows of the cache are equal.

    `cache[:batch]` of a cache for 8 rows would run for 8 rows at most. A cache that forward uses in another way stays.
    """
    steps = [*recording.steps]
    same: dict[StepResult, Any] = {}
    for number, step in enumerate(recording.steps):
        if step.target is not aten.clone.default or not isinstance(step.args[0], Constant):
            continue
        cache, value = StepResult(number), step.args[0].value
        readers = [i for i, reader in enumerate(steps) if any(o == cache for o in reader.operands)]
        rows = _rows_taken([steps[i] for i in readers], value)
        if rows is None or cache in recording.outputs:
            continue
        row = Constant(value[:1].clone(), None, belongs_to_module=True)
        args = row, [rows, *[1] * (value.dim() - 1)]
        first, *others = readers
        steps[first] = replace(steps[first], target=aten.repeat.default, args=args, kwargs={}, is_view=False)
        same |= {StepResult(i): StepResult(first) for i in others}
    return _replace_operands(replace(recording, steps=steps), same)


def _rows_taken(readers: Sequence[Step], cache: torch.Tensor) -> int | None:
    """Return how many rows all readers of a cache take; None if its rows differ, or if it is read in another way."""
    places = {reader.place for reader in readers}
    place = next(iter(places)) if len(places) == 1 else None
    if place is None or any(reader.target is not aten.slice.Tensor for reader in readers) or not cache.dim():
        return None
    if place.shape[1:] != cache.shape[1:] or place.shape[0] > len(cache):
        return None
    return place.shape[0] if torch.equal(cache, cache[:1].expand_as(cache)) else None


def forward_writes(recording: Recording) -> Recording:
    """Let operations read a written value and not the tensor into which it was written.

    A model that keeps a cache of its own writes keys into a part of a tensor and reads the same part again. A part of
    which another write changed anything is not replaced.
    """
    written: dict[int, list[tuple[Place, Any]]] = {}
    values: dict[StepResult, Any] = {}
    for i, step in enumerate(recording.steps):
        if step.place is None:
            continue
        history = written.setdefault(step.place.storage, [])
        write = _write(step)
        if write is not None and _same_form(recording, write[1], write[0]):
            history.append((write[0], values.get(write[1], write[1])))
        elif writes(step.target):
            history.append((step.place, None))
        elif history and history[-1][1] is not None and history[-1][0].elements == step.place.elements:
            values[StepResult(i)] = history[-1][1]
    return _replace_operands(recording, values) if values else recording


def _write(step: Step) -> tuple[Place, Any] | None:
    """Return the elements that an operation writes, with their new values; None if these elements are not known."""
    assert step.place is not None
    if step.target is aten.copy_.default:
        return step.place, step.args[1]
    if step.target is aten.index_put_.default and not any(step.args[3:]):
        axes = [axis for axis, index in enumerate(step.args[1]) if index is not None]
        positions, values = step.args[1][axes[0]] if len(axes) == 1 else None, step.args[2]
        return _rows(step.place, axes[0], positions, values)
    if step.target is aten.index_copy_.default:
        axis, positions, values = step.args[1:]
        return _rows(step.place, axis % len(step.place.shape), positions, values)
    return None


def _rows(place: Place, axis: int, positions: Any, values: Any) -> tuple[Place, Any] | None:
    """Return the rows of an axis, with their new values, if the positions do not depend on data and have no gaps."""
    if not isinstance(positions, Constant) or positions.value.dim() != 1 or not len(positions.value):
        return None
    if positions.value.dtype not in (torch.int64, torch.int32):  # a mask counts its true elements
        return None
    count, start = len(positions.value), int(positions.value[0])
    if start < 0 or not torch.equal(positions.value.long(), torch.arange(start, start + count)):
        return None
    shape = (*place.shape[:axis], count, *place.shape[axis + 1 :])
    return replace(place, offset=place.offset + start * place.strides[axis], shape=shape), values


def _same_form(recording: Recording, source: Any, place: Place) -> bool:
    if not isinstance(source, StepResult):
        return False
    form = recording.steps[source.number].place
    return (
        form is not None and form.shape == place.shape and form.dtype == place.dtype and form.storage != place.storage
    )


def numbers_of_the_path(recordings: Sequence[Recording]) -> dict[StepResult, Any]:
    """Return the tensors that hold one whole number in all recordings, because Python has read it out of them.

    `for expert in ids.unique()` reads the numbers of the experts. The path of the recordings is that of these
    numbers, so the tensors are constants of it.
    """
    read = [
        {n.source: n.value for n in r.numbers if isinstance(n.source, StepResult) and type(n.value) is int}
        for r in recordings
    ]
    shared = {source: value for source, value in read[0].items() if all(other.get(source) == value for other in read)}
    dtypes = {source: place.dtype for source in shared if (place := recordings[0].steps[source.number].place)}
    return {
        source: Constant(torch.tensor(shared[source], dtype=dtype), None, belongs_to_module=True)
        for source, dtype in dtypes.items()
    }


def without_empty_pieces(recording: Recording) -> Recording:
    """Let `cat` join no pieces without elements, of which code that joins blocks has one more for each block."""
    forms = recording.input_forms

    def is_empty(piece: Any) -> bool:
        if isinstance(piece, InputRef):
            return 0 in forms[piece.number][0]
        if isinstance(piece, Constant):
            return not piece.value.numel()
        place = recording.steps[piece.number].place
        return place is not None and 0 in place.shape

    steps = []
    for step in recording.steps:
        if step.target is aten.cat.default:
            pieces = [piece for piece in step.args[0] if not is_empty(piece)] or [*step.args[0][:1]]
            step = replace(step, args=(pieces, *step.args[1:]))
        steps.append(step)
    return remove_dead_steps(replace(recording, steps=steps))


def _replace_operands(recording: Recording, values: Mapping[StepResult, Any]) -> Recording:
    if not values:
        return recording

    def new(operand: Any) -> Any:
        while isinstance(operand, StepResult) and operand in values:
            operand = values[operand]
        return operand

    steps = [
        replace(s, args=pytree.tree_map(new, s.args), kwargs=pytree.tree_map(new, s.kwargs)) for s in recording.steps
    ]
    return replace(recording, steps=steps, outputs=[new(output) for output in recording.outputs])


def remove_dead_steps(recording: Recording, keep_alike: bool = False) -> Recording:
    """Remove the operations on which no output depends, and number the others again.

    keep_alike: whether an operation stays if the same line runs it for an output too. So the last run of a loop, whose
        state nothing reads, has the operations of the others.
    """
    live = _live_steps(recording, keep_alike)
    numbers = {old: StepResult(new) for new, old in enumerate(live)}

    def renumbered(operand: Any) -> Any:
        return numbers[operand.number] if isinstance(operand, StepResult) else operand

    kept = [
        replace(s, args=pytree.tree_map(renumbered, s.args), kwargs=pytree.tree_map(renumbered, s.kwargs))
        for s in (recording.steps[old] for old in live)
    ]
    numbers_read = [
        replace(n, source=renumbered(n.source))
        for n in recording.numbers
        if isinstance(n.source, InputRef) or n.source.number in numbers
    ]
    return replace(recording, steps=kept, outputs=[renumbered(o) for o in recording.outputs], numbers=numbers_read)


def _live_steps(recording: Recording, keep_alike: bool) -> list[int]:
    """Return the numbers of the operations that `remove_dead_steps` keeps, in their order.

    read: the operations that made the tensors that live operations read. Writes into these tensors are live too.
    alike: the operation and line of each live operation, as of the last pass.
    """
    steps = recording.steps
    bases = _bases(steps)
    live = {o.number for o in recording.outputs if isinstance(o, StepResult)}
    read: set[int] = set().union(*(bases[i] for i in live))
    alike: set[Any] = set()
    while True:
        for i in reversed(range(len(steps))):
            is_alike = (steps[i].target, steps[i].stack_trace) in alike
            if i in live or is_alike or (writes(steps[i].target) and bases[i] & read):
                operands = {o.number for o in steps[i].operands if isinstance(o, StepResult)}
                live |= {i, *operands}
                read = read.union(*(bases[j] for j in operands))
        found = {(steps[i].target, steps[i].stack_trace) for i in live}
        if not keep_alike or found == alike:
            return sorted(live)
        alike = found


def _bases(steps: Sequence[Step]) -> list[set[int]]:
    """Return for each operation those that made the tensors whose elements its result shows."""
    bases: list[set[int]] = []
    for i, step in enumerate(steps):
        shown = step.args[:1] if writes(step.target) else step.operands if step.is_view else ()
        viewed = [operand.number for operand in shown if isinstance(operand, StepResult)]
        bases.append(set().union(*(bases[j] for j in viewed)) or {i})
    return bases
