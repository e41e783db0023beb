"""Loops over positions as one operation: the repeated operations of a recording become the body of a loop.

An operand of an operation of the body is the same in each run, a row of a sequence, a result of the same run, or a
result of the run before, which is carried. A loop that reads anything else is not rolled.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.find_loops import Loop, find_loops
from tformer_export.capture.by_example.recording import (
    Constant,
    InputRef,
    LoopBody,
    Place,
    Recording,
    Slot,
    Step,
    StepResult,
    writes,
)
from tformer_export.capture.by_example.rows_of_loops import normalise_rows
from tformer_export.capture.by_example.simplify import remove_dead_steps
from tformer_export.capture.by_example.size_fit import Sizes
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import aten

_TENSORS = (StepResult, InputRef, Constant)


def roll_loops(recordings: Sequence[Recording], sizes: Sequence[Sizes]) -> list[Recording]:
    """Return the recordings with each loop over positions as one operation.

    Raises LoopError if a loop cannot be rolled, and DisagreementError if the recordings differ in other ways than in
    the number of runs of their loops. Cost: grows with the number of operations.
    """
    normal = [remove_dead_steps(normalise_rows(recording), keep_alike=True) for recording in recordings]
    loops = find_loops(normal, sizes)
    return [remove_dead_steps(_Roller(r, found).run()) for r, found in zip(normal, loops, strict=True)]


@dataclass(frozen=True)
class _Operand:
    """An operand of the body that comes from outside: the kind ("state", "sequence", "other") and its number."""

    kind: str
    number: int


@dataclass(frozen=True)
class _RowRead:
    """How the body reads a sequence: at run i, `window` rows from row i + first (or from the end), of an axis.

    window: None for one row without its axis.
    """

    axis: int
    first: int
    window: int | None
    is_reversed: bool


@dataclass
class _State:
    """A value that is carried. place: the place in a run of its value after the run."""

    place: int
    initial: Any


@dataclass
class _Rolled:
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
    states: dict[Any, _State] = field(default_factory=dict)
    sequences: dict[Any, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)
    others: dict[Any, Any] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    reads: dict[int, tuple[Any, _RowRead]] = field(default_factory=dict)
    fixed: dict[int, StepResult] = field(default_factory=dict)
    number: StepResult | None = None


class _Roller:
    """Rolls the loops of one recording. Old operations keep their numbers until the end, new ones get greater ones."""

    def __init__(self, recording: Recording, loops: Sequence[Loop]) -> None:
        self.recording = recording
        self.steps = list(recording.steps)
        self.order: list[int] = []  # of the new recording
        self.renamed: dict[int, StepResult] = {}
        self.loops = [_Rolled(x.end - x.period * x.count, x.end, x.period, x.count) for x in loops]
        self.place_of: dict[int, tuple[_Rolled, int, int]] = {}  # result in a loop → the loop, its run and place
        for loop in self.loops:
            for number in range(loop.begin, loop.end):
                self.place_of[number] = loop, *divmod(number - loop.begin, loop.period)
        for number, step in enumerate(recording.steps):
            self._note_uses(step.operands, self.place_of.get(number, (None,))[0])
            for entries in (a for a in step.args if isinstance(a, (list, tuple))):
                self._note_states_before(entries)
        self._note_uses(recording.outputs, None)

    def _note_uses(self, operands: Sequence[Any], inside: _Rolled | None) -> None:
        for operand in operands:
            if isinstance(operand, StepResult) and operand.number in self.place_of:
                loop, run, place = self.place_of[operand.number]
                if loop is not inside:
                    loop.uses.setdefault(place, set()).add(run)

    def _note_states_before(self, entries: Sequence[Any]) -> None:
        """Note entries that are the values of a state before each run: its initial value and all but the last one."""
        for at, entry in enumerate(entries[1:]):
            loop, run, place = self._where(entry) or (None, 0, 0)
            if loop is None or run != 0 or self._where(entries[at]) not in (None, (loop, 0, place)):
                continue
            if self._runs(loop, place, entries[at + 1 : at + loop.count]) == [*range(loop.count - 1)]:
                loop.before[place] = -1

    def _runs(self, loop: _Rolled, place: int, entries: Sequence[Any]) -> list[int]:
        """Return the runs of which entries are the results at a place."""
        found = [self._where(entry) for entry in entries]
        return [x[1] for x in found if x is not None and x[0] is loop and x[2] == place]

    def run(self) -> Recording:
        at = 0
        for loop in self.loops:
            for number in range(at, loop.begin):
                self._copy(number)
            self._roll(loop)
            at = loop.end
        for number in range(at, len(self.recording.steps)):
            self._copy(number)
        outputs = [self._outside(output) for output in self.recording.outputs]
        numbers = [replace(n, source=self._outside(n.source)) for n in self.recording.numbers]
        new = {old: StepResult(i) for i, old in enumerate(self.order)}

        def renumbered(value: Any) -> Any:
            return pytree.tree_map(lambda x: new[x.number] if isinstance(x, StepResult) else x, value)

        steps = [
            replace(s, args=renumbered(s.args), kwargs=renumbered(dict(s.kwargs)))
            for s in (self.steps[old] for old in self.order)
        ]
        numbers = [replace(n, source=renumbered(n.source)) for n in numbers]
        return replace(self.recording, steps=steps, outputs=renumbered(outputs), numbers=numbers)

    # -- operations outside loops ----------------------------------------------------------------------------------

    def _copy(self, number: int) -> None:
        step = self.recording.steps[number]
        if step.target in (aten.stack.default, aten.cat.default) and any(
            isinstance(x, StepResult) and x.number in self.place_of for x in step.args[0]
        ):
            self._join(number, step)
            return
        args, kwargs = pytree.tree_map(self._outside, (step.args, dict(step.kwargs)))
        self.steps[number] = replace(step, args=args, kwargs=kwargs)
        self.order.append(number)

    def _outside(self, operand: Any) -> Any:
        """Return what an operation outside a loop reads in the place of an operand."""
        if not isinstance(operand, StepResult):
            return operand
        if operand.number not in self.place_of:
            return self.renamed.get(operand.number, operand)
        loop, run, place = self.place_of[operand.number]
        step = self.recording.steps[operand.number]
        if place in loop.fixed:
            return loop.fixed[place]
        if place in loop.reads:
            source, _ = loop.reads[place]
            return self._emit(replace(step, args=(source, *step.args[1:])))
        if run == loop.count - 1:
            for i, state in enumerate(loop.states.values()):
                if state.place == place:
                    return self._result(loop, len(loop.rows) + len(loop.before) + i, step.place)
        if run not in (0, loop.count - 1):
            raise LoopError("a value of a single run is read after it", step.stack_trace)
        rows = self._rows(loop, place, is_reversed=False)
        return self._new(aten.select.int, (rows, 0, 0 if run == 0 else -1), step, self._form(operand)[0])

    def _rows(self, loop: _Rolled, place: int, is_reversed: bool) -> StepResult:
        """Return the results of all runs, stacked on a new first axis."""
        step = self.recording.steps[loop.begin + place]
        shape, dtype = self._form(StepResult(loop.begin + place))
        if place in loop.reads:
            source, read = loop.reads[place]
            rows: Any = self._sequence(source, replace(read, is_reversed=False), loop.count, step)
            if read.window is not None:
                last = [*range(len(shape))]  # the axis of a window is the last one
                last.insert(read.axis, last.pop())
                rows = self._new(aten.permute.default, (rows, [0, *(i + 1 for i in last)]), step, (loop.count, *shape))
            is_reversed ^= read.is_reversed
        elif place in loop.rows:
            rows = self._result(loop, loop.rows[place], _place((loop.count, *shape), dtype))
        else:
            raise LoopError("a value that is the same at every position is read for each of them", step.stack_trace)
        return self._new(aten.flip.default, (rows, [0]), step, (loop.count, *shape)) if is_reversed else rows

    def _result(self, loop: _Rolled, index: int, place: Place | None) -> StepResult:
        trace = self.recording.steps[loop.begin].stack_trace
        return self._emit(Step(operator.getitem, (loop.number, index), {}, trace, place))

    def _join(self, number: int, step: Step) -> None:
        """Let `stack` or `cat` read the results of a loop as one tensor."""
        entries = step.args[0]
        forms = [self._form(entry)[0] for entry in entries]
        stacks = step.target is aten.stack.default
        axis = (step.args[1] if len(step.args) > 1 else 0) % (len(forms[0]) + stacks)
        pieces: list[Any] = []
        at = 0
        while at < len(entries):
            found = self._all_runs(entries[at:])
            before = self._states_before(entries[at:])
            if before is not None:
                found = before
            if found is None:
                piece = self._outside(entries[at])
                if stacks:
                    shape = (*forms[at][:axis], 1, *forms[at][axis:])
                    piece = self._new(aten.unsqueeze.default, (piece, axis), step, shape)
                pieces.append(piece)
                at += 1
                continue
            loop, place, is_reversed = found
            shape = forms[at]
            if before is None:
                rows = self._rows(loop, place, is_reversed)
            else:
                rows = self._result(loop, loop.before[place], _place((loop.count, *shape), self._form(entries[at])[1]))
            moved = self._moved(rows, 0, axis, (loop.count, *shape), step)
            if not stacks:
                joined = (*shape[:axis], loop.count * shape[axis], *shape[axis + 1 :])
                if shape[axis] == 1:
                    moved = self._new(aten.squeeze.dim, (moved, axis + 1), step, joined)
                else:
                    moved = self._new(aten.flatten.using_ints, (moved, axis, axis + 1), step, joined)
            pieces.append(moved)
            at += loop.count
        if len(pieces) == 1:
            self.renamed[number] = pieces[0]
            return
        self.steps[number] = replace(step, target=aten.cat.default, args=(pieces, axis), kwargs={})
        self.order.append(number)

    def _all_runs(self, entries: Sequence[Any]) -> tuple[_Rolled, int, bool] | None:
        """Return the loop, the place and the direction of entries that begin with the results of all runs of a loop."""
        first = entries[0]
        if not isinstance(first, StepResult) or first.number not in self.place_of:
            return None
        loop, run, place = self.place_of[first.number]
        if place in loop.fixed or len(entries) < loop.count or run not in (0, loop.count - 1):
            return None
        is_reversed = run != 0
        runs = range(loop.count)[::-1] if is_reversed else range(loop.count)
        expected = [StepResult(loop.begin + run * loop.period + place) for run in runs]
        return (loop, place, is_reversed) if [*entries[: loop.count]] == expected else None

    def _states_before(self, entries: Sequence[Any]) -> tuple[_Rolled, int, bool] | None:
        """Return the loop and the place of entries that begin with the values of a state before each run."""
        loop, run, place = (self._where(entries[1]) if len(entries) > 1 else None) or (None, 0, 0)
        if loop is None or run != 0 or loop.before.get(place, -1) < 0:
            return None
        initial = [state.initial for state in loop.states.values() if state.place == place]
        runs = self._runs(loop, place, entries[1 : loop.count])
        return (
            (loop, place, False)
            if _key(entries[0]) in map(_key, initial) and runs == [*range(loop.count - 1)]
            else None
        )

    # -- loops -----------------------------------------------------------------------------------------------------

    def _roll(self, loop: _Rolled) -> None:
        for place in range(loop.period):
            self._roll_step(loop, place)
        needed = [
            place
            for place, runs in sorted(loop.uses.items())
            if place in loop.body
            and (runs != {loop.count - 1} or all(state.place != place for state in loop.states.values()))
        ]
        loop.rows = {place: i for i, place in enumerate(needed)}
        old = {state.place: i for i, state in enumerate(loop.states.values()) if state.place in loop.before}
        loop.before = {place: len(needed) + i for i, place in enumerate(old)}
        if not loop.rows and not loop.states:
            return
        first = self.recording.steps[loop.begin]
        initial = [self._initial(loop, state) for state in loop.states.values()]
        new_values = [self._inside(loop, state.place) for state in loop.states.values()]  # may add operands
        if not loop.sequences:
            raise LoopError("it reads no rows of a sequence", first.stack_trace)
        starts = {"state": 0, "sequence": len(loop.states), "other": len(loop.states) + len(loop.sequences)}
        places = {place: i for i, place in enumerate(loop.body)}

        def final(value: Any) -> Any:
            if isinstance(value, _Operand):
                return Slot(starts[value.kind] + value.number)
            return StepResult(places[value.number]) if isinstance(value, StepResult) else value

        steps = [
            replace(s, args=pytree.tree_map(final, s.args), kwargs=pytree.tree_map(final, dict(s.kwargs)))
            for s in loop.body.values()
        ]
        outputs = [*new_values, *(StepResult(place) for place in loop.rows)]
        outputs += [_Operand("state", i) for i in old.values()]
        others = list(loop.others.values())
        shapes = [
            *(self._form(StepResult(loop.begin + state.place))[0] for state in loop.states.values()),
            *(shape for _, shape in loop.sequences.values()),
            *(self._form(other)[0] for other in others),
        ]
        results = [final(value) for value in outputs]
        body = LoopBody(steps, results, shapes, len(loop.states), len(loop.sequences), loop.count)
        operands = (*initial, *(sequence for sequence, _ in loop.sequences.values()), *others)
        traced = next((self.recording.steps[loop.begin + s.place] for s in loop.states.values()), first)
        loop.number = self._emit(Step(Scan, operands, {}, traced.stack_trace, body=body))

    def _roll_step(self, loop: _Rolled, place: int) -> None:
        numbers = range(loop.begin + place, loop.end, loop.period)
        cases = [self.recording.steps[number] for number in numbers]
        step = cases[0]
        if writes(step.target):
            raise LoopError("it writes into a part of a tensor", step.stack_trace)
        if len({case.place and (case.place.shape, case.place.dtype) for case in cases}) > 1:
            raise LoopError("a value has another shape in each run", step.stack_trace)
        spec = pytree.tree_structure((step.args, dict(step.kwargs)))
        if any(pytree.tree_structure((case.args, dict(case.kwargs))) != spec for case in cases):
            raise LoopError("an operand differs from run to run", step.stack_trace)
        leaves = [*zip(*(case.operands for case in cases), strict=True)]
        read = self._row_read(loop, step, leaves)
        if read is not None:
            loop.reads[place] = read
            return
        operands = [self._operand(loop, values, step) for values in leaves]
        if all(
            isinstance(x, _Operand) and x.kind == "other" for x in operands if isinstance(x, (_Operand, StepResult))
        ):
            outside = pytree.tree_unflatten([self._outside(values[0]) for values in leaves], spec)
            loop.fixed[place] = self._emit(replace(step, args=outside[0], kwargs=outside[1]))
            return
        args, kwargs = pytree.tree_unflatten(operands, spec)
        loop.body[place] = replace(step, args=args, kwargs=kwargs)

    def _operand(self, loop: _Rolled, values: Sequence[Any], step: Step) -> Any:
        """Return an operand of the body: a number, a result of the same run, or an operand from outside."""
        if not any(isinstance(value, _TENSORS) for value in values):
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                return values[0]
            raise LoopError("a number differs from run to run", step.stack_trace)
        where = [self._where(value) for value in values]
        inside = [found is not None and found[0] is loop for found in where]
        places = {found[2] for found in where[1:] if found is not None}
        runs = [found[1] for found in where if found is not None and found[0] is loop]
        if len(places) == 1 and runs == [*range(loop.count)]:
            return self._inside(loop, places.pop())
        if len(places) == 1 and not inside[0] and runs == [*range(loop.count - 1)]:
            place = places.pop()
            key = place, _key(values[0])
            loop.states.setdefault(key, _State(place, values[0]))
            return _Operand("state", [*loop.states].index(key))
        if not any(inside):
            if all(_is_same(value, values[0]) for value in values):
                return self._other(loop, self._outside(values[0]))
            rows = self._rows_of_runs(loop, values, step)
            if rows is not None:
                return rows
        raise LoopError(
            "it reads a value that is neither a row of this position nor of the run before", step.stack_trace
        )

    def _rows_of_runs(self, loop: _Rolled, values: Sequence[Any], step: Step) -> _Operand | None:
        """Return the sequence of operands that differ from run to run: constants, or results of another loop."""
        if all(isinstance(value, Constant) for value in values):
            if len({(value.value.shape, value.value.dtype) for value in values}) > 1:
                return None
            key: Any = tuple(_key(value) for value in values)
            if key not in loop.sequences:
                stacked = Constant(torch.stack([value.value for value in values]), None)
                loop.sequences[key] = stacked, tuple(values[0].value.shape)
            return _Operand("sequence", [*loop.sequences].index(key))
        found = self._all_runs(values)
        if found is None or found[0].count != loop.count:
            return None
        other, place, is_reversed = found
        key = id(other), place, is_reversed
        if key not in loop.sequences:
            rows = self._rows(other, place, is_reversed)
            loop.sequences[key] = rows, self._form(StepResult(other.begin + place))[0]
        return _Operand("sequence", [*loop.sequences].index(key))

    def _inside(self, loop: _Rolled, place: int) -> Any:
        """Return an operand of the body that is the result of another operation of the same run."""
        if place in loop.fixed:
            return self._other(loop, loop.fixed[place])
        if place not in loop.reads:
            return StepResult(place)
        source, read = loop.reads[place]
        key = _key(source), read
        step = self.recording.steps[loop.begin + place]
        shape = self._form(StepResult(loop.begin + place))[0]
        if key not in loop.sequences:
            row = shape
            if read.window is not None:
                row = (*shape[: read.axis], *shape[read.axis + 1 :], read.window)
            loop.sequences[key] = self._sequence(source, read, loop.count, step), row
        operand = _Operand("sequence", [*loop.sequences].index(key))
        if read.window is None:
            return operand
        order = [*range(len(shape) - 1)]
        order.insert(read.axis, len(shape) - 1)
        loop.body[place] = replace(step, target=aten.permute.default, args=(operand, order), kwargs={})
        return StepResult(place)

    def _row_read(self, loop: _Rolled, step: Step, leaves: Sequence[Sequence[Any]]) -> tuple[Any, _RowRead] | None:
        """Return the source of an operation that reads the rows of a run, and the way; None for other operations."""
        if step.target not in (aten.select.int, aten.slice.Tensor) or len(leaves) < 3:
            return None
        sources, (axis, *_), starts, *ends = leaves
        if not isinstance(sources[0], _TENSORS) or len({*starts}) < 2:
            return None
        first = sources[0]
        if isinstance(first, StepResult) and first.number in self.place_of:
            owner, _, place = self.place_of[first.number]
            if owner is loop:
                if place not in loop.fixed:
                    return None
                source: Any = loop.fixed[place]
            else:
                source = self._outside(first)
        else:
            source = self._outside(first)
        if not (isinstance(first, StepResult) and self._is_fixed(loop, first)) and not all(
            _is_same(other, first) for other in sources
        ):
            return None
        shape, _ = self._form(first)
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
            return source, _RowRead(axis, begins[0], window, is_reversed=False)
        return (
            (source, _RowRead(axis, begins[-1], window, is_reversed=True))
            if begins[::-1] == [*range(begins[-1], begins[-1] + loop.count)]
            else None
        )

    def _is_fixed(self, loop: _Rolled, value: StepResult) -> bool:
        owner, _, place = self.place_of.get(value.number, (None, 0, 0))
        return owner is loop and place in loop.fixed

    def _sequence(self, source: Any, read: _RowRead, count: int, step: Step) -> Any:
        """Return the rows that the runs read, with time as the first axis and the axis of a window as the last one."""
        shape, _ = self._form(source)
        rows, window = source, read.window or 1
        if read.first or shape[read.axis] != count + window - 1:
            shape = (*shape[: read.axis], count + window - 1, *shape[read.axis + 1 :])
            args = rows, read.axis, read.first, read.first + count + window - 1
            rows = self._new(aten.slice.Tensor, args, step, shape)
        if read.window is not None:
            shape = (*shape[: read.axis], count, *shape[read.axis + 1 :], read.window)
            rows = self._new(aten.unfold.default, (rows, read.axis, read.window, 1), step, shape)
        rows = self._moved(rows, read.axis, 0, shape, step)
        shape = (count, *shape[: read.axis], *shape[read.axis + 1 :])
        return self._new(aten.flip.default, (rows, [0]), step, shape) if read.is_reversed else rows

    def _initial(self, loop: _Rolled, state: _State) -> Any:
        shape, dtype = self._form(StepResult(loop.begin + state.place))
        step = self.recording.steps[loop.begin + state.place]
        if not isinstance(state.initial, _TENSORS):
            return Constant(torch.full(shape, state.initial, dtype=dtype), None)
        found, found_dtype = self._form(state.initial)
        aligned = (1,) * (len(shape) - len(found)) + found
        if found_dtype != dtype or any(size not in (1, n) for size, n in zip(aligned, shape, strict=False)):
            raise LoopError("it carries a value that does not keep its shape and dtype", step.stack_trace)
        initial = self._outside(state.initial)
        return initial if found == shape else self._new(aten.expand.default, (initial, [*shape]), step, shape)

    def _other(self, loop: _Rolled, operand: Any) -> _Operand:
        key = _key(operand)
        loop.others.setdefault(key, operand)
        return _Operand("other", [*loop.others].index(key))

    def _where(self, value: Any) -> tuple[_Rolled, int, int] | None:
        return self.place_of.get(value.number) if isinstance(value, StepResult) else None

    # -- new operations --------------------------------------------------------------------------------------------

    def _form(self, operand: Any) -> tuple[tuple[int, ...], torch.dtype]:
        if isinstance(operand, Constant):
            return tuple(operand.value.shape), operand.value.dtype
        if isinstance(operand, InputRef):
            return self.recording.input_forms[operand.number]
        place = self.steps[operand.number].place
        if place is None:
            raise LoopError("it reads a list of tensors", self.steps[operand.number].stack_trace)
        return place.shape, place.dtype

    def _moved(self, rows: Any, source: int, target: int, shape: tuple[int, ...], step: Step) -> Any:
        if source == target:
            return rows
        order = [*range(len(shape))]
        order.insert(target, order.pop(source))
        return self._new(aten.permute.default, (rows, order), step, tuple(shape[i] for i in order))

    def _new(self, target: Any, args: tuple[Any, ...], step: Step, shape: Sequence[int]) -> StepResult:
        _, dtype = self._form(args[0])
        return self._emit(Step(target, args, {}, step.stack_trace, _place(shape, dtype)))

    def _emit(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.order.append(len(self.steps) - 1)
        return StepResult(len(self.steps) - 1)


def _place(shape: Sequence[int], dtype: torch.dtype) -> Place:
    """Return the place of a new tensor, in a storage of its own."""
    return Place(-1, 0, tuple(shape), (), dtype)


def _key(operand: Any) -> Any:
    """Return a key that is the same for the same operand. Made constants are compared by their nodes."""
    if not isinstance(operand, Constant):
        return operand
    value = operand.value
    if operand.belongs_to_module:
        return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), tuple(value.stride())
    return operand.node if operand.node is not None else id(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return one.value is other.value or (
            one.value.dtype == other.value.dtype and torch.equal(one.value, other.value)
        )
    return type(one) is type(other) and bool(one == other)
