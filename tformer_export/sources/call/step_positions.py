"""How a forward counts the positions of its step input.

A file needs, for each position, the logits of the token that follows it. Code for training often counts otherwise:

- It drops the last position: `forward(ids)` gives logits of `ids[:, :-1]`, to be compared with `ids[:, 1:]`.
- It has a row of its own in front, and takes `ids` for the labels. The logits have this row too.
- It runs with one number of positions alone, such as that of its table.

The position behind the last is then any token, and so are positions that fill a row: they must have no influence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tformer_export.common.module_state import restored


@dataclass(frozen=True)
class StepPositions:
    """How forward counts the positions of its step input.

    replaces_first: forward has a row of its own in the place of the token that decoding starts with. It is not given
        that token.
    rows_in_front: the number of rows of the logits before those of the step input, which are dropped.
    drops_last: each call has one position more.
    length: the number of positions that forward runs with; 0 for any.
    """

    replaces_first: bool = False
    rows_in_front: int = 0
    drops_last: bool = False
    length: int = 0

    def to_module(self, step: torch.Tensor) -> torch.Tensor:
        """Return the step input, (batch, time, …), as forward takes it."""
        step = step[:, 1:] if self.replaces_first else step
        more = self.length - step.shape[1] if self.length else int(self.drops_last)
        return nn.functional.pad(step, (*[0, 0] * (step.dim() - 2), 0, more)) if self.length or more else step

    def from_module(self, logits: torch.Tensor, axis: int, time: int | torch.SymInt) -> torch.Tensor:
        """Return the logits of the positions of the step input. `axis` is the time axis of the logits."""
        if self.rows_in_front:
            logits = logits.narrow(axis, self.rows_in_front, logits.shape[axis] - self.rows_in_front)
        return logits.narrow(axis, 0, time) if self.length else logits


PLAIN = StepPositions()


def find_step_positions(
    adapter: nn.Module, step_input: str | None, inputs: Mapping[str, torch.Tensor]
) -> StepPositions:
    """Find out how forward counts the positions of its step input, by which of them have an influence on which logits.

    A model without another input gets a prompt, whose tokens are all given. Else the step input begins with the token
    that decoding starts with. A row that forward has in front stands for it.

    Cost: at most ten runs of forward. Rows in front are looked for where the step input is ids.
    """
    if step_input is None or inputs[step_input].dim() < 2 or inputs[step_input].shape[1] < 3:
        return PLAIN
    probe = _Probe(adapter, step_input, inputs)
    if probe.first is None or probe.first.dim() != 3 or probe.first.shape[0] != probe.step.shape[0]:
        return PLAIN
    time, rows = probe.step.shape[1], probe.first.shape[1]
    if rows == time and probe.runs_with_this_length_alone() and probe.has_no_influence(-1, rows - 1):
        return StepPositions(length=time)
    drops_last = probe.has_no_influence(-1, rows)
    in_front = rows - time + int(drops_last)
    last = -2 if drops_last else -1
    if in_front < 0 or not (probe.has_no_influence(last, rows - 1) and probe.has_influence(last, rows - 1)):
        return PLAIN
    if in_front == 0:
        return StepPositions(drops_last=drops_last)
    if probe.step.is_floating_point():
        return PLAIN
    if len(inputs) == 1:
        return StepPositions(False, in_front, drops_last)
    return StepPositions(True, 0, drops_last) if in_front == 1 else PLAIN


class _Probe:
    """Runs forward on changed examples. The state of the module is restored after each run."""

    def __init__(self, adapter: nn.Module, name: str, inputs: Mapping[str, torch.Tensor]) -> None:
        self.adapter, self.name, self.inputs = adapter, name, inputs
        self.step = inputs[name]
        self.first = self._run(self.step)

    def has_no_influence(self, position: int, count: int) -> bool:
        """Return whether the first `count` rows of logits are the same whatever stands at a position."""
        runs = [*self._changed(position)]
        return bool(runs) and all(self._has_equal_rows(run, 0, count) for run in runs)

    def has_influence(self, position: int, row: int) -> bool:
        """Return whether a row of logits changes with a position."""
        return any(run is not None and not self._has_equal_rows(run, row, row + 1) for run in self._changed(position))

    def runs_with_this_length_alone(self) -> bool:
        time = self.step.shape[1]
        others = (self.step[:, torch.arange(n) % time] for n in (time - 2, time - 1, time + 1, time + 2))
        return all(self._run(other) is None for other in others)

    def _has_equal_rows(self, run: torch.Tensor | None, start: int, stop: int) -> bool:
        assert self.first is not None
        if run is None or run.shape != self.first.shape:
            return False
        return torch.equal(run[:, start:stop], self.first[:, start:stop])

    def _changed(self, position: int) -> Iterator[torch.Tensor | None]:
        """Yield the logits of up to two examples with another value at a position, in each row."""
        found = 0
        for other in range(self.step.shape[1]):
            value = self.step.clone()
            value[:, position] = self.step[:, other].flip(0)
            same = (value[:, position] == self.step[:, position]).flatten(1 if value.dim() > 2 else 0)
            if not bool((same.all(1) if value.dim() > 2 else same).any()):
                yield self._run(value)
                found += 1
            if found == 2:
                return

    def _run(self, step: torch.Tensor) -> torch.Tensor | None:
        """Return the logits; None if forward fails or returns something else."""
        inputs = {**self.inputs, self.name: step}
        try:
            with restored(self.adapter):
                output = self.adapter(*(value.clone() for value in inputs.values()))
        except Exception:  # the analysis reports errors of forward
            return None
        return output if isinstance(output, torch.Tensor) else None
