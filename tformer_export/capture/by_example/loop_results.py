"""Operations outside of loops read the results of all runs as one tensor, or the states after the last run."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.recording import Place, Step, StepResult
from tformer_export.capture.by_example.rolled_loops import RolledLoop, RollingRecording, key_of, new_place
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.common.fx_nodes import aten


class LoopResults:
    """Gives operations outside of loops their operands, and copies these operations to the new recording."""

    def __init__(self, rolling: RollingRecording) -> None:
        self.rolling, self.recording = rolling, rolling.recording
        self.renamed: dict[int, StepResult] = {}
        for number, step in enumerate(self.recording.steps):
            self._note_uses(step.operands, rolling.place_of.get(number, (None,))[0])
            for entries in (a for a in step.args if isinstance(a, (list, tuple))):
                self._note_states_before(entries)
        self._note_uses(self.recording.outputs, None)

    def _note_uses(self, operands: Sequence[Any], inside: RolledLoop | None) -> None:
        for operand in operands:
            if isinstance(operand, StepResult) and operand.number in self.rolling.place_of:
                loop, run, place = self.rolling.place_of[operand.number]
                if loop is not inside:
                    loop.uses.setdefault(place, set()).add(run)

    def _note_states_before(self, entries: Sequence[Any]) -> None:
        """Note entries that are the values of a state before each run: its initial value and all but the last one."""
        for at, entry in enumerate(entries[1:]):
            loop, run, place = self.rolling.where(entry) or (None, 0, 0)
            if loop is None or run != 0 or self.rolling.where(entries[at]) not in (None, (loop, 0, place)):
                continue
            if self.rolling.runs(loop, place, entries[at + 1 : at + loop.count]) == [*range(loop.count - 1)]:
                loop.before[place] = -1

    def copy(self, number: int) -> None:
        step = self.recording.steps[number]
        if step.target in (aten.stack.default, aten.cat.default) and any(
            isinstance(x, StepResult) and x.number in self.rolling.place_of for x in step.args[0]
        ):
            self._join(number, step)
            return
        args, kwargs = pytree.tree_map(self.outside, (step.args, dict(step.kwargs)))
        self.rolling.steps[number] = replace(step, args=args, kwargs=kwargs)
        self.rolling.order.append(number)

    def outside(self, operand: Any) -> Any:
        """Return what an operation outside a loop reads in the place of an operand."""
        if not isinstance(operand, StepResult):
            return operand
        if operand.number not in self.rolling.place_of:
            return self.renamed.get(operand.number, operand)
        loop, run, place = self.rolling.place_of[operand.number]
        step = self.recording.steps[operand.number]
        if place in loop.fixed:
            return loop.fixed[place]
        if place in loop.reads:
            source, _ = loop.reads[place]
            return self.rolling.emit(replace(step, args=(source, *step.args[1:])))
        if run == loop.count - 1:
            for i, state in enumerate(loop.states.values()):
                if state.place == place:
                    return self.result(loop, len(loop.rows) + len(loop.before) + i, step.place)
        if run not in (0, loop.count - 1):
            raise LoopError("a value of a single run is read after it", step.stack_trace)
        rows = self.rows(loop, place, is_reversed=False)
        return self.rolling.new(aten.select.int, (rows, 0, 0 if run == 0 else -1), step, self.rolling.form(operand)[0])

    def rows(self, loop: RolledLoop, place: int, is_reversed: bool) -> StepResult:
        """Return the results of all runs, stacked on a new first axis."""
        step = self.recording.steps[loop.begin + place]
        shape, dtype = self.rolling.form(StepResult(loop.begin + place))
        if place in loop.reads:
            source, read = loop.reads[place]
            rows: Any = self.rolling.sequence(source, replace(read, is_reversed=False), loop.count, step)
            if read.window is not None:
                last = [*range(len(shape))]  # the axis of a window is the last one
                last.insert(read.axis, last.pop())
                rows = self.rolling.new(
                    aten.permute.default, (rows, [0, *(i + 1 for i in last)]), step, (loop.count, *shape)
                )
            is_reversed ^= read.is_reversed
        elif place in loop.rows:
            rows = self.result(loop, loop.rows[place], new_place((loop.count, *shape), dtype))
        else:
            raise LoopError("a value that is the same at every position is read for each of them", step.stack_trace)
        return self.rolling.new(aten.flip.default, (rows, [0]), step, (loop.count, *shape)) if is_reversed else rows

    def result(self, loop: RolledLoop, index: int, place: Place | None) -> StepResult:
        trace = self.recording.steps[loop.begin].stack_trace
        return self.rolling.emit(Step(operator.getitem, (loop.number, index), {}, trace, place))

    def all_runs(self, entries: Sequence[Any]) -> tuple[RolledLoop, int, bool] | None:
        """Return the loop, the place and the direction of entries that begin with the results of all runs of a loop."""
        first = entries[0]
        if not isinstance(first, StepResult) or first.number not in self.rolling.place_of:
            return None
        loop, run, place = self.rolling.place_of[first.number]
        if place in loop.fixed or len(entries) < loop.count or run not in (0, loop.count - 1):
            return None
        is_reversed = run != 0
        runs = range(loop.count)[::-1] if is_reversed else range(loop.count)
        expected = [StepResult(loop.begin + run * loop.period + place) for run in runs]
        return (loop, place, is_reversed) if [*entries[: loop.count]] == expected else None

    def _join(self, number: int, step: Step) -> None:
        """Let `stack` or `cat` read the results of a loop as one tensor."""
        entries = step.args[0]
        forms = [self.rolling.form(entry)[0] for entry in entries]
        stacks = step.target is aten.stack.default
        axis = (step.args[1] if len(step.args) > 1 else 0) % (len(forms[0]) + stacks)
        pieces: list[Any] = []
        at = 0
        while at < len(entries):
            found = self.all_runs(entries[at:])
            before = self._states_before(entries[at:])
            if before is not None:
                found = before
            if found is None:
                piece = self.outside(entries[at])
                if stacks:
                    shape = (*forms[at][:axis], 1, *forms[at][axis:])
                    piece = self.rolling.new(aten.unsqueeze.default, (piece, axis), step, shape)
                pieces.append(piece)
                at += 1
                continue
            loop, place, is_reversed = found
            shape = forms[at]
            if before is None:
                rows = self.rows(loop, place, is_reversed)
            else:
                rows = self.result(
                    loop, loop.before[place], new_place((loop.count, *shape), self.rolling.form(entries[at])[1])
                )
            moved = self.rolling.moved(rows, 0, axis, (loop.count, *shape), step)
            if not stacks:
                joined = (*shape[:axis], loop.count * shape[axis], *shape[axis + 1 :])
                if shape[axis] == 1:
                    moved = self.rolling.new(aten.squeeze.dim, (moved, axis + 1), step, joined)
                else:
                    moved = self.rolling.new(aten.flatten.using_ints, (moved, axis, axis + 1), step, joined)
            pieces.append(moved)
            at += loop.count
        if len(pieces) == 1:
            self.renamed[number] = pieces[0]
            return
        self.rolling.steps[number] = replace(step, target=aten.cat.default, args=(pieces, axis), kwargs={})
        self.rolling.order.append(number)

    def _states_before(self, entries: Sequence[Any]) -> tuple[RolledLoop, int, bool] | None:
        """Return the loop and the place of entries that begin with the values of a state before each run."""
        loop, run, place = (self.rolling.where(entries[1]) if len(entries) > 1 else None) or (None, 0, 0)
        if loop is None or run != 0 or loop.before.get(place, -1) < 0:
            return None
        initial = [state.initial for state in loop.states.values() if state.place == place]
        runs = self.rolling.runs(loop, place, entries[1 : loop.count])
        return (
            (loop, place, False)
            if key_of(entries[0]) in map(key_of, initial) and runs == [*range(loop.count - 1)]
            else None
        )
