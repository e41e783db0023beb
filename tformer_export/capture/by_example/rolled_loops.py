"""A recording while its loops are rolled: what is known of each loop, and the operations of the new recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.find_loops import Loop
from tformer_export.capture.by_example.recording import (
    Constant,
    InputRef,
    Place,
    ReadNumber,
    Recording,
    Step,
    StepResult,
)
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.common.fx_nodes import aten

TENSORS = (StepResult, InputRef, Constant)


@dataclass(frozen=True)
class OuterOperand:
    """An operand of the body that comes from outside: the kind ("state", "sequence", "other") and its number."""

    kind: str
    number: int


@dataclass(frozen=True)
class RowRead:
    """How the body reads a sequence: at run i, `window` rows from row i + first (or from the end), of an axis.

    window: None for one row without its axis.
    """

    axis: int
    first: int
    window: int | None
    is_reversed: bool


@dataclass
class LoopState:
    """A value that is carried. place: the place in a run of its value after the run."""

    place: int
    initial: Any


@dataclass
class RolledLoop:
    """A loop while it is rolled.

    begin, end: the numbers of its operations.
    uses: place in a run → the runs whose result is read outside.
    body: the operations that run for each position, by their place in a run.
    sequences: the new operand and the shape of a row. others: the operands.
    rows: place → number among the results.
    before: the places of states whose values before each run are needed after the loop, then as `rows`.
    reads: place → the source and the way of an operation that only reads rows.
    fixed: place → the operation's result outside, which is the same in each run.
    number: of the operation in the new recording.
    """

    begin: int
    end: int
    period: int
    count: int
    uses: dict[int, set[int]] = field(default_factory=dict)
    body: dict[int, Step] = field(default_factory=dict)
    states: dict[Any, LoopState] = field(default_factory=dict)
    sequences: dict[Any, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)
    others: dict[Any, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    reads: dict[int, tuple[Any, RowRead]] = field(default_factory=dict)
    fixed: dict[int, StepResult] = field(default_factory=dict)
    number: StepResult | None = None


class RollingRecording:
    """A recording and the operations of the new one. Old operations keep their numbers, new ones get greater ones.

    steps: the operations of both. order: those of the new recording.
    """

    def __init__(self, recording: Recording, loops: Sequence[Loop]) -> None:
        self.recording = recording
        self.steps = list(recording.steps)
        self.order: list[int] = []
        self.loops = [RolledLoop(x.end - x.period * x.count, x.end, x.period, x.count) for x in loops]
        self.place_of: dict[int, tuple[RolledLoop, int, int]] = {}  # result in a loop → the loop, its run and place
        for loop in self.loops:
            for number in range(loop.begin, loop.end):
                self.place_of[number] = loop, *divmod(number - loop.begin, loop.period)

    def where(self, value: Any) -> tuple[RolledLoop, int, int] | None:
        return self.place_of.get(value.number) if isinstance(value, StepResult) else None

    def runs(self, loop: RolledLoop, place: int, entries: Sequence[Any]) -> list[int]:
        """Return the runs of which entries are the results at a place."""
        found = [self.where(entry) for entry in entries]
        return [x[1] for x in found if x is not None and x[0] is loop and x[2] == place]

    def form(self, operand: Any) -> tuple[tuple[int, ...], torch.dtype]:
        if isinstance(operand, Constant):
            return tuple(operand.value.shape), operand.value.dtype
        if isinstance(operand, InputRef):
            return self.recording.input_forms[operand.number]
        place = self.steps[operand.number].place
        if place is None:
            raise LoopError("it reads a list of tensors", self.steps[operand.number].stack_trace)
        return place.shape, place.dtype

    def emit(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.order.append(len(self.steps) - 1)
        return StepResult(len(self.steps) - 1)

    def new(self, target: Any, args: tuple[Any, ...], step: Step, shape: Sequence[int]) -> StepResult:
        _, dtype = self.form(args[0])
        return self.emit(Step(target, args, {}, step.stack_trace, new_place(shape, dtype)))

    def moved(self, rows: Any, source: int, target: int, shape: tuple[int, ...], step: Step) -> Any:
        if source == target:
            return rows
        order = [*range(len(shape))]
        order.insert(target, order.pop(source))
        return self.new(aten.permute.default, (rows, order), step, tuple(shape[i] for i in order))

    def sequence(self, source: Any, read: RowRead, count: int, step: Step) -> Any:
        """Return the rows that the runs read, with time as the first axis and the axis of a window as the last one."""
        shape, _ = self.form(source)
        rows, window = source, read.window or 1
        if read.first or shape[read.axis] != count + window - 1:
            shape = (*shape[: read.axis], count + window - 1, *shape[read.axis + 1 :])
            args = rows, read.axis, read.first, read.first + count + window - 1
            rows = self.new(aten.slice.Tensor, args, step, shape)
        if read.window is not None:
            shape = (*shape[: read.axis], count, *shape[read.axis + 1 :], read.window)
            rows = self.new(aten.unfold.default, (rows, read.axis, read.window, 1), step, shape)
        rows = self.moved(rows, read.axis, 0, shape, step)
        shape = (count, *shape[: read.axis], *shape[read.axis + 1 :])
        return self.new(aten.flip.default, (rows, [0]), step, shape) if read.is_reversed else rows

    def finish(self, outputs: Sequence[Any], numbers: Sequence[ReadNumber]) -> Recording:
        """Return the new recording, with its operations numbered again."""
        new = {old: StepResult(i) for i, old in enumerate(self.order)}

        def renumbered(value: Any) -> Any:
            return pytree.tree_map(lambda x: new[x.number] if isinstance(x, StepResult) else x, value)

        steps = [
            replace(s, args=renumbered(s.args), kwargs=renumbered(dict(s.kwargs)))
            for s in (self.steps[old] for old in self.order)
        ]
        numbers = [replace(n, source=renumbered(n.source)) for n in numbers]
        return replace(self.recording, steps=steps, outputs=renumbered(outputs), numbers=numbers)


def new_place(shape: Sequence[int], dtype: torch.dtype) -> Place:
    """Return the place of a new tensor, in a storage of its own."""
    return Place(-1, 0, tuple(shape), (), dtype)


def key_of(operand: Any) -> Any:
    """Return a key that is the same for the same operand. Made constants are compared by their nodes."""
    if not isinstance(operand, Constant):
        return operand
    value = operand.value
    if operand.belongs_to_module:
        return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), tuple(value.stride())
    return operand.node if operand.node is not None else id(value)


def is_same_operand(one: Any, other: Any) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return one.value is other.value or (
            one.value.dtype == other.value.dtype and torch.equal(one.value, other.value)
        )
    return type(one) is type(other) and bool(one == other)
