"""Recordings of loops in one form: rows are read by `select`, and rows that are written into a buffer are stacked.

`x.unbind(1)`, `x.split(1, 1)` and `for row in x` read rows too. A state that is changed in place is a new value.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.recording import Constant, Place, Recording, Step, StepResult, writes
from tformer_export.common.fx_nodes import aten

END = 2**63 - 1

Substitutes = Mapping[StepResult, Any]


def normalise_rows(recording: Recording) -> Recording:
    """Return the recording with the operations of this module's description in one form."""
    recording = _read_rows(recording)
    recording = _replace_in_place(recording)
    return _stack_written_rows(recording)


def substitute(value: Any, substitutes: Substitutes) -> Any:
    """Return operands with some results of operations replaced, also in lists."""

    def new(operand: Any) -> Any:
        while isinstance(operand, StepResult) and operand in substitutes:
            operand = substitutes[operand]
        return operand

    return pytree.tree_map(new, value)


def with_operands(recording: Recording, steps: Sequence[Step], substitutes: Substitutes) -> Recording:
    changed = [
        replace(step, args=substitute(step.args, substitutes), kwargs=substitute(dict(step.kwargs), substitutes))
        for step in steps
    ]
    return replace(recording, steps=changed, outputs=substitute(list(recording.outputs), substitutes))


def _read_rows(recording: Recording) -> Recording:
    """Read single rows by `select` and `slice`, and drop slices of whole axes."""
    whole: dict[StepResult, Any] = {}
    steps = []
    for number, step in enumerate(recording.steps):
        if step.target is aten.slice.Tensor and _slice_bounds(step) == (0, END, 1):
            whole[StepResult(number)] = step.args[0]
        steps.append(_row_of_list(step, recording.steps) or step)
    return with_operands(recording, steps, whole)


def _row_of_list(step: Step, steps: Sequence[Step]) -> Step | None:
    if len(step.args) != 2 or not isinstance(step.args[0], StepResult) or not isinstance(step.args[1], int):
        return None
    source, index = steps[step.args[0].number], step.args[1]
    if source.place is not None:
        return None
    if source.target is aten.unbind.int:
        dim = source.args[1] if len(source.args) > 1 else 0
        return replace(step, target=aten.select.int, args=(source.args[0], dim, index), kwargs={})
    if source.target is aten.split.Tensor and source.args[1] == 1:
        dim = source.args[2] if len(source.args) > 2 else 0
        return replace(step, target=aten.slice.Tensor, args=(source.args[0], dim, index, index + 1), kwargs={})
    return None


def _slice_bounds(step: Step) -> tuple[Any, Any, Any]:
    start, end, by = [*step.args, *(None, 0, None, END, 1)[len(step.args) :]][2:]
    return start or 0, END if end is None else end, by


def _replace_in_place(recording: Recording) -> Recording:
    """Let operations return a new value where they change one in place that nothing else shows afterwards."""
    steps = list(recording.steps)
    last_use = _last_uses(recording)
    shown: dict[int, list[int]] = {}  # storage → the results so far that show elements of it
    substitutes: dict[StepResult, Any] = {}
    for number, step in enumerate(recording.steps):
        place, changed = step.place, step.args[0] if step.args else None
        if place is None:
            continue
        others = shown.setdefault(place.storage, [])
        others.append(number)
        if not writes(step.target) or not isinstance(changed, StepResult):
            continue
        before = recording.steps[changed.number].place
        read_later = [recording.steps[i].place for i in others[:-1] if last_use.get(i, -1) > number]
        if before is None or before.elements != place.elements or any(_overlap(place, p) for p in read_later):
            continue
        if step.target is aten.copy_.default:
            source = step.args[1]
            form = recording.steps[source.number].place if isinstance(source, StepResult) else None
            if form is not None and (form.shape, form.dtype) == (place.shape, place.dtype):
                substitutes[StepResult(number)] = source
        elif (functional := _functional(step.target)) is not None:
            steps[number] = replace(step, target=functional, is_view=False)
    return with_operands(recording, steps, substitutes)


def _overlap(one: Place, other: Place | None) -> bool:
    """Return whether two places of one storage have an element in common."""
    assert other is not None
    ends = [p.offset + sum((n - 1) * step for n, step in zip(p.shape, p.strides, strict=True)) for p in (one, other)]
    if 0 in one.shape or 0 in other.shape or ends[0] < other.offset or ends[1] < one.offset:
        return False
    marked = torch.zeros(max(ends) + 1, dtype=torch.bool)
    marked.as_strided(one.shape, one.strides, one.offset).fill_(True)
    return bool(marked.as_strided(other.shape, other.strides, other.offset).any())


def _functional(target: Any) -> Callable[..., Any] | None:
    """Return the operation that returns a new value in the place of changing its operand; None if there is none."""
    packet = getattr(getattr(torch.ops, target.namespace), target._opname.removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None) if target._opname.endswith("_") else None
    return None if found is None or writes(found) else found


def _last_uses(recording: Recording) -> dict[int, int]:
    """Return for each result the number of the last operation that has it as an operand."""
    last = {o.number: len(recording.steps) for o in recording.outputs if isinstance(o, StepResult)}
    for number, step in reversed([*enumerate(recording.steps)]):
        for operand in step.operands:
            if isinstance(operand, StepResult):
                last.setdefault(operand.number, number)
    return last


def _stack_written_rows(recording: Recording) -> Recording:
    """Stack rows that are written one by one into a buffer, each before the buffer is read.

    The stack is made in front of the first operation that reads the buffer.
    """
    steps = list(recording.steps)
    users: dict[StepResult, list[int]] = {}
    for number, step in enumerate(steps):
        for operand in set(step.operands):
            if isinstance(operand, StepResult):
                users.setdefault(operand, []).append(number)
    read = {*users, *recording.outputs}
    stacks: dict[StepResult, tuple[int, Step]] = {}  # buffer → the number of its first reader, and the stack
    written: set[int] = set()  # operations that show the rows
    for number, step in enumerate(steps):
        buffer = StepResult(number)
        readers = [user for user in users.get(buffer, ()) if StepResult(user) in read or writes(steps[user].target)]
        rows = _written_rows(steps, users, buffer, readers) if step.place is not None else None
        if rows is not None:
            axis, writes_of_rows, before = rows
            entries = [StepResult(write) for write in writes_of_rows]
            for write in writes_of_rows:  # the row itself, which may be that of a state before the run
                row = steps[write]
                written.add(row.args[0].number)
                steps[write] = replace(row, target=aten.clone.default, args=row.args[1:2], kwargs={}, is_view=False)
            last = steps[writes_of_rows[-1]]
            stack = replace(last, target=aten.stack.default, args=(entries, axis), place=step.place)
            stacks[buffer] = before, stack
    return _with_stacks(replace(recording, steps=steps), stacks, written) if stacks else recording


def _with_stacks(
    recording: Recording, stacks: Mapping[StepResult, tuple[int, Step]], written: Container[int]
) -> Recording:
    """Insert stacks in the place of writes, and let operations after a stack read it and not the buffer."""
    steps = [*recording.steps, *(stack for _, stack in stacks.values())]
    number_of = {buffer: StepResult(len(recording.steps) + i) for i, buffer in enumerate(stacks)}
    order: list[int] = []
    known: dict[StepResult, StepResult] = {}
    for number in range(len(recording.steps) + 1):
        for buffer, (before, _) in stacks.items():
            if before == number:
                order.append(number_of[buffer].number)
                known[buffer] = number_of[buffer]
        if number < len(recording.steps) and number not in written:
            step = steps[number]
            steps[number] = replace(
                step, args=substitute(step.args, known), kwargs=substitute(dict(step.kwargs), known)
            )
            order.append(number)
    new = {StepResult(old): StepResult(i) for i, old in enumerate(order)}

    def renumbered(value: Any) -> Any:
        return pytree.tree_map(lambda x: new[x] if isinstance(x, StepResult) else x, value)

    changed = [
        replace(step, args=renumbered(step.args), kwargs=renumbered(dict(step.kwargs)))
        for step in (steps[old] for old in order)
    ]
    outputs = renumbered(substitute(list(recording.outputs), known))
    numbers = [replace(n, source=renumbered(n.source)) for n in recording.numbers]
    return replace(recording, steps=changed, outputs=outputs, numbers=numbers)


def _written_rows(
    steps: Sequence[Step], users: Mapping[StepResult, list[int]], buffer: StepResult, readers: Sequence[int]
) -> tuple[int, list[int], int] | None:
    """Return how the rows of a buffer are written, before anything else reads it; None if they are not.

    The result is the axis of the rows, the number of the operation that writes each, and that of the first reader.
    """
    shape = steps[buffer.number].place.shape  # type: ignore[union-attr]
    found: dict[int, int] = {}  # row → the number of its write
    axes = set()
    others = []
    for user in readers:
        step, row_users = steps[user], users.get(StepResult(user), [])
        write = steps[row_users[0]] if len(row_users) == 1 else None
        if step.target is not aten.select.int or write is None or write.target is not aten.copy_.default:
            others.append(user)
            continue
        place = step.place
        if (
            place is None
            or write.args[0] != StepResult(user)
            or _form(steps, write.args[1]) != (place.shape, place.dtype)
        ):
            return None
        if users.get(StepResult(row_users[0])):
            return None
        axes.add(step.args[1] % len(shape))
        found[step.args[2]] = row_users[0]
    if len(axes) != 1 or sorted(found) != [*range(shape[min(axes)])]:
        return None
    if any(user < max(found.values()) for user in others):
        return None
    return min(axes), [found[i] for i in sorted(found)], min(others, default=len(steps))


def _form(steps: Sequence[Step], operand: Any) -> tuple[Any, ...] | None:
    if isinstance(operand, Constant):
        return tuple(operand.value.shape), operand.value.dtype
    place = steps[operand.number].place if isinstance(operand, StepResult) else None
    return None if place is None else (place.shape, place.dtype)
