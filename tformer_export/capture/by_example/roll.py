"""Loops over positions as one operation: the repeated operations of a recording become the body of a loop.

An operand of an operation of the body is the same in each run, a row of a sequence, a result of the same run, or a
result of the run before, which is carried. A loop that reads anything else is not rolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.find_loops import Loop, find_loops
from tformer_export.capture.by_example.loop_results import LoopResults
from tformer_export.capture.by_example.recording import Constant, LoopBody, Recording, Slot, Step, StepResult, writes
from tformer_export.capture.by_example.rolled_loops import (
    TENSORS,
    LoopState,
    OuterOperand,
    RolledLoop,
    RollingRecording,
    RowRead,
    is_same_operand,
    key_of,
)
from tformer_export.capture.by_example.rows_of_loops import normalise_rows
from tformer_export.capture.by_example.simplify import remove_dead_steps
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import aten


def roll_loops(recordings: Sequence[Recording], sizes: Sequence[Sizes]) -> list[Recording]:
    """Return the recordings with each loop over positions as one operation.

    Raises LoopError if a loop cannot be rolled, and DisagreementError if the recordings differ in other ways than in
    the number of runs of their loops. Cost: grows with the number of operations.
    """
    normal = [remove_dead_steps(normalise_rows(recording), keep_alike=True) for recording in recordings]
    loops = find_loops(normal, sizes)
    return [remove_dead_steps(_Roller(r, found).run()) for r, found in zip(normal, loops, strict=True)]


class _Roller:
    """Rolls the loops of one recording."""

    def __init__(self, recording: Recording, loops: Sequence[Loop]) -> None:
        self.recording = recording
        self.rolling = RollingRecording(recording, loops)
        self.results = LoopResults(self.rolling)

    def run(self) -> Recording:
        at = 0
        for loop in self.rolling.loops:
            for number in range(at, loop.begin):
                self.results.copy(number)
            self._roll(loop)
            at = loop.end
        for number in range(at, len(self.recording.steps)):
            self.results.copy(number)
        outputs = [self.results.outside(output) for output in self.recording.outputs]
        numbers = [replace(n, source=self.results.outside(n.source)) for n in self.recording.numbers]
        return self.rolling.finish(outputs, numbers)

    def _roll(self, loop: RolledLoop) -> None:
        """Add the loop as one operation of the new recording."""
        for place in range(loop.period):
            self._roll_step(loop, place)
        states_before = self._number_results(loop)
        if not loop.rows and not loop.states:
            return
        first = self.recording.steps[loop.begin]
        initial = [self._initial(loop, state) for state in loop.states.values()]
        new_values = [self._inside(loop, state.place) for state in loop.states.values()]  # may add operands
        if not loop.sequences:
            raise LoopError("it reads no rows of a sequence", first.stack_trace)
        body = self._body(loop, [*new_values, *(StepResult(place) for place in loop.rows), *states_before])
        operands = (*initial, *(sequence for sequence, _ in loop.sequences.values()), *loop.others.values())
        traced = next((self.recording.steps[loop.begin + s.place] for s in loop.states.values()), first)
        loop.number = self.rolling.emit(Step(Scan, operands, {}, traced.stack_trace, body=body))

    def _number_results(self, loop: RolledLoop) -> list[OuterOperand]:
        """Number the results of the loop that are read outside: rows of all runs, then states before each run.

        Return these states. The last value of a state needs no rows, because it is a result of its own.
        """
        carried = {state.place for state in loop.states.values()}
        needed = [
            place
            for place, runs in sorted(loop.uses.items())
            if place in loop.body and (place not in carried or runs != {loop.count - 1})
        ]
        loop.rows = {place: i for i, place in enumerate(needed)}
        numbers = {state.place: i for i, state in enumerate(loop.states.values()) if state.place in loop.before}
        loop.before = {place: len(needed) + i for i, place in enumerate(numbers)}
        return [OuterOperand("state", number) for number in numbers.values()]

    def _body(self, loop: RolledLoop, results: Sequence[Any]) -> LoopBody:
        """Return the body, whose operands are numbered: states, rows of sequences, other values."""
        starts = {"state": 0, "sequence": len(loop.states), "other": len(loop.states) + len(loop.sequences)}
        places = {place: i for i, place in enumerate(loop.body)}

        def numbered(value: Any) -> Any:
            if isinstance(value, OuterOperand):
                return Slot(starts[value.kind] + value.number)
            return StepResult(places[value.number]) if isinstance(value, StepResult) else value

        steps = [
            replace(s, args=pytree.tree_map(numbered, s.args), kwargs=pytree.tree_map(numbered, dict(s.kwargs)))
            for s in loop.body.values()
        ]
        shapes = [
            *(self.rolling.form(StepResult(loop.begin + state.place))[0] for state in loop.states.values()),
            *(shape for _, shape in loop.sequences.values()),
            *(self.rolling.form(other)[0] for other in loop.others.values()),
        ]
        outputs = [numbered(result) for result in results]
        return LoopBody(steps, outputs, shapes, len(loop.states), len(loop.sequences), loop.count)

    def _roll_step(self, loop: RolledLoop, place: int) -> None:
        """Note how the operation at a place of each run is computed: by reading rows, outside once, or in the body."""
        runs = self.recording.steps[loop.begin + place : loop.end : loop.period]
        _check_runs(runs)
        step = runs[0]
        spec = pytree.tree_structure((step.args, dict(step.kwargs)))
        leaves = [*zip(*(run.operands for run in runs), strict=True)]
        read = self._row_read(loop, step, leaves)
        if read is not None:
            loop.reads[place] = read
            return
        operands = [self._operand(loop, values, step) for values in leaves]
        if all(
            isinstance(x, OuterOperand) and x.kind == "other"
            for x in operands
            if isinstance(x, (OuterOperand, StepResult))
        ):
            outside = pytree.tree_unflatten([self.results.outside(values[0]) for values in leaves], spec)
            loop.fixed[place] = self.rolling.emit(replace(step, args=outside[0], kwargs=outside[1]))
            return
        args, kwargs = pytree.tree_unflatten(operands, spec)
        loop.body[place] = replace(step, args=args, kwargs=kwargs)

    def _operand(self, loop: RolledLoop, values: Sequence[Any], step: Step) -> Any:
        """Return an operand of the body: a number, a result of the same run, or an operand from outside."""
        if not any(isinstance(value, TENSORS) for value in values):
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                return values[0]
            raise LoopError("a number differs from run to run", step.stack_trace)
        where = [self.rolling.where(value) for value in values]
        inside = [found is not None and found[0] is loop for found in where]
        places = {found[2] for found in where[1:] if found is not None}
        runs = [found[1] for found in where if found is not None and found[0] is loop]
        if len(places) == 1 and runs == [*range(loop.count)]:
            return self._inside(loop, places.pop())
        if len(places) == 1 and not inside[0] and runs == [*range(loop.count - 1)]:
            place = places.pop()
            key = place, key_of(values[0])
            loop.states.setdefault(key, LoopState(place, values[0]))
            return OuterOperand("state", [*loop.states].index(key))
        if not any(inside):
            if all(is_same_operand(value, values[0]) for value in values):
                return self._other(loop, self.results.outside(values[0]))
            rows = self._rows_of_runs(loop, values, step)
            if rows is not None:
                return rows
        raise LoopError(
            "it reads a value that is neither a row of this position nor of the run before", step.stack_trace
        )

    def _rows_of_runs(self, loop: RolledLoop, values: Sequence[Any], step: Step) -> OuterOperand | None:
        """Return the sequence of operands that differ from run to run: constants, or results of another loop."""
        if all(isinstance(value, Constant) for value in values):
            if len({(value.value.shape, value.value.dtype) for value in values}) > 1:
                return None
            key: Any = tuple(key_of(value) for value in values)
            if key not in loop.sequences:
                stacked = Constant(torch.stack([value.value for value in values]), None)
                loop.sequences[key] = stacked, tuple(values[0].value.shape)
            return OuterOperand("sequence", [*loop.sequences].index(key))
        found = self.results.all_runs(values)
        if found is None or found[0].count != loop.count:
            return None
        other, place, is_reversed = found
        key = id(other), place, is_reversed
        if key not in loop.sequences:
            rows = self.results.rows(other, place, is_reversed)
            loop.sequences[key] = rows, self.rolling.form(StepResult(other.begin + place))[0]
        return OuterOperand("sequence", [*loop.sequences].index(key))

    def _inside(self, loop: RolledLoop, place: int) -> Any:
        """Return an operand of the body that is the result of another operation of the same run."""
        if place in loop.fixed:
            return self._other(loop, loop.fixed[place])
        if place not in loop.reads:
            return StepResult(place)
        source, read = loop.reads[place]
        key = key_of(source), read
        step = self.recording.steps[loop.begin + place]
        shape = self.rolling.form(StepResult(loop.begin + place))[0]
        if key not in loop.sequences:
            row = shape
            if read.window is not None:
                row = (*shape[: read.axis], *shape[read.axis + 1 :], read.window)
            loop.sequences[key] = self.rolling.sequence(source, read, loop.count, step), row
        operand = OuterOperand("sequence", [*loop.sequences].index(key))
        if read.window is None:
            return operand
        order = [*range(len(shape) - 1)]
        order.insert(read.axis, len(shape) - 1)
        loop.body[place] = replace(step, target=aten.permute.default, args=(operand, order), kwargs={})
        return StepResult(place)

    def _row_read(self, loop: RolledLoop, step: Step, leaves: Sequence[Sequence[Any]]) -> tuple[Any, RowRead] | None:
        """Return the source of an operation that reads the rows of a run, and the way; None for other operations."""
        if step.target not in (aten.select.int, aten.slice.Tensor) or len(leaves) < 3:
            return None
        sources, (axis, *_), starts, *ends = leaves
        if not isinstance(sources[0], TENSORS) or len({*starts}) < 2:
            return None
        first = sources[0]
        if isinstance(first, StepResult) and first.number in self.rolling.place_of:
            owner, _, place = self.rolling.place_of[first.number]
            if owner is loop:
                if place not in loop.fixed:
                    return None
                source: Any = loop.fixed[place]
            else:
                source = self.results.outside(first)
        else:
            source = self.results.outside(first)
        if not (isinstance(first, StepResult) and self._is_fixed(loop, first)) and not all(
            is_same_operand(other, first) for other in sources
        ):
            return None
        shape, _ = self.rolling.form(first)
        axis %= len(shape)
        size = shape[axis]
        begins = [start + size if start < 0 else start for start in starts]
        window = None
        if step.target is aten.slice.Tensor:
            widths = {min(end, size) - begin for begin, end in zip(begins, ends[0] if ends else (), strict=True)}
            if len(widths) != 1 or (len(ends) > 1 and {*ends[1]} != {1}):
                return None
            (window,) = widths
        rising = [*range(begins[0], begins[0] + loop.count)]
        if begins == rising:
            return source, RowRead(axis, begins[0], window, is_reversed=False)
        return (
            (source, RowRead(axis, begins[-1], window, is_reversed=True))
            if begins[::-1] == [*range(begins[-1], begins[-1] + loop.count)]
            else None
        )

    def _is_fixed(self, loop: RolledLoop, value: StepResult) -> bool:
        owner, _, place = self.rolling.place_of.get(value.number, (None, 0, 0))
        return owner is loop and place in loop.fixed

    def _initial(self, loop: RolledLoop, state: LoopState) -> Any:
        shape, dtype = self.rolling.form(StepResult(loop.begin + state.place))
        step = self.recording.steps[loop.begin + state.place]
        if not isinstance(state.initial, TENSORS):
            return Constant(torch.full(shape, state.initial, dtype=dtype), None)
        found, found_dtype = self.rolling.form(state.initial)
        aligned = (1,) * (len(shape) - len(found)) + found
        if found_dtype != dtype or any(size not in (1, n) for size, n in zip(aligned, shape, strict=False)):
            raise LoopError("it carries a value that does not keep its shape and dtype", step.stack_trace)
        initial = self.results.outside(state.initial)
        return initial if found == shape else self.rolling.new(aten.expand.default, (initial, [*shape]), step, shape)

    def _other(self, loop: RolledLoop, operand: Any) -> OuterOperand:
        key = key_of(operand)
        loop.others.setdefault(key, operand)
        return OuterOperand("other", [*loop.others].index(key))


def _check_runs(runs: Sequence[Step]) -> None:
    """Raise LoopError if the operations at one place of all runs cannot be one operation of a body."""
    step = runs[0]
    if writes(step.target):
        raise LoopError("it writes into a part of a tensor", step.stack_trace)
    if len({run.place and (run.place.shape, run.place.dtype) for run in runs}) > 1:
        raise LoopError("a value has another shape in each run", step.stack_trace)
    spec = pytree.tree_structure((step.args, dict(step.kwargs)))
    if any(pytree.tree_structure((run.args, dict(run.kwargs))) != spec for run in runs):
        raise LoopError("an operand differs from run to run", step.stack_trace)
