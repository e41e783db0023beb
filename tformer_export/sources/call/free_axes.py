"""Which axes of an input may vary: forward is run at other sizes, and its errors are counted.

Ids are (batch, time). Other inputs may have channels before time, as mel spectrograms (batch, 80, frames). Any input
may have one size, as images (batch, 3, 32, 32), and histories and texts of a fixed length. The axes are looked for
only where forward does not run with axes (0, 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tformer_export.common.example_sizes import distinct_sizes, least_size
from tformer_export.common.source_lines import line_of_error
from tformer_runtime.base.errors import SourceError, error_summary

Axes = Mapping[str, Sequence[int]]
MAX_CHOICES = 64  # of axes of all inputs together
_SIZES: tuple[tuple[Callable[[int], int], ...], ...] = (  # an axis is free if forward runs at both sizes of a pair
    (lambda size: size - 1, lambda size: size // 2),
    (lambda size: size + 1, lambda size: 2 * size + 1),  # where there are as few positions as the model needs
)


@dataclass(frozen=True)
class FreeAxes:
    """The batch and time axes of each input where they are not (0, 1), and the positions that an input needs."""

    axes: dict[str, tuple[int, ...]]
    min_lengths: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisProbe:
    """Runs forward at other sizes.

    run: a function that runs forward on inputs with these axes. It raises whatever forward raises.
    stated: axes that the caller named.
    """

    run: Callable[[Mapping[str, torch.Tensor], Axes], None]
    example: Mapping[str, torch.Tensor]
    stated: Axes
    step_input: str | None

    def find(self) -> FreeAxes:
        """Find the axes of the inputs other than the step input.

        Cost: one run of forward at small sizes if all axes are (0, 1). Else up to four runs, at half to twice the sizes
        of the example, for each axis of an input (for each combination of them, with several inputs), and one for each
        halving of the length if forward does not run at small sizes.

        Raises SourceError if several axes may vary and one has to be chosen, or if no axis is a batch.
        """
        stated = FreeAxes({name: tuple(axes) for name, axes in self.stated.items()})
        unknown = [name for name, value in self.example.items() if self._is_unknown(name, value)]
        choices = [[(0,), *((0, axis) for axis in range(1, self.example[name].dim()))] for name in unknown]
        too_many = math.prod(map(len, choices)) > MAX_CHOICES
        if too_many or self._runs_small(stated) or self._error(self.example, stated.axes) is not None:
            return stated
        if not unknown:
            longer = [name for name, axes in self.stated.items() if len(axes) > 1 and name != self.step_input]
            return FreeAxes(stated.axes, self._min_lengths(longer, stated.axes))
        candidates = [
            {**stated.axes, **dict(zip(unknown, choice, strict=True))} for choice in itertools.product(*choices)
        ]
        fixed = candidates[0]
        failure = self._error(self._resized(fixed, lambda size: size), fixed)
        if failure is not None and len(unknown) == len(self.example):
            raise _no_batch_axis(unknown, self.example, failure)
        if failure is not None:
            return stated
        varying = [fixed, *filter(self._varies, candidates[1:])]
        most = max(map(_num_axes, varying))
        best = [axes for axes in varying if _num_axes(axes) == most]
        if len(best) > 1:
            raise _ambiguous([name for name in unknown if len({axes[name] for axes in best}) > 1], best)
        axes = best[0]
        return FreeAxes(axes, self._min_lengths([name for name in unknown if len(axes[name]) > 1], axes))

    def _is_unknown(self, name: str, value: torch.Tensor) -> bool:
        return name not in self.stated and name != self.step_input and value.dim() > 1

    def _varies(self, axes: Axes) -> bool:
        changed = [self.example[name].shape[axis] for name, own in axes.items() for axis in own[1:]]
        return any(
            all(resize(size) >= 1 for resize in resizes for size in changed)
            and all(self._error(self._resized(axes, resize), axes) is None for resize in resizes)
            for resizes in _SIZES
        )

    def _min_lengths(self, names: Sequence[str], axes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the least lengths at which forward runs, if it does not run at small sizes."""
        if not names or self._runs_small(FreeAxes(axes)):
            return {}
        lengths = {}
        for name in names:
            axis, length = axes[name][1], self.example[name].shape[axes[name][1]]

            def runs(size: int, name: str = name, axis: int = axis) -> bool:
                shorter = {**self.example, name: self.example[name].narrow(axis, 0, size)}
                return self._error(shorter, axes) is None

            lengths[name] = least_size(runs, length)
        return {name: length for name, length in lengths.items() if length > 1}

    def _runs_small(self, free: FreeAxes) -> bool:
        """Return whether forward runs at the sizes of a trace."""
        front = {
            name: value.movedim(free.axes.get(name, (0,)), (0, 1)[: len(free.axes.get(name, (0,)))])
            for name, value in self.example.items()
        }
        in_front = {
            name: (0, 1)[: len(free.axes[name])] if name in free.axes else (0, 1)[: value.dim()]
            for name, value in self.example.items()
        }
        sized = distinct_sizes(front, in_front, self.step_input, max(free.min_lengths.values(), default=0))
        moved = {
            name: value.movedim((0, 1)[: len(free.axes.get(name, (0,)))], free.axes.get(name, (0,)))
            for name, value in sized.items()
        }
        return self._error(moved, free.axes) is None

    def _resized(self, axes: Axes, resize: Callable[[int], int]) -> dict[str, torch.Tensor]:
        """Return the example with a row more, and with other lengths of the inputs other than the step input."""
        resized = {}
        for name, value in self.example.items():
            batch, *time = axes.get(name, (0, 1)[: value.dim()])
            sizes = {batch: value.shape[batch] + 1}
            if time and name != self.step_input:
                sizes[time[0]] = max(1, resize(value.shape[time[0]]))
            for axis, size in sizes.items():
                value = value.index_select(axis, torch.arange(size) % value.shape[axis])
            resized[name] = value
        return resized

    def _error(self, inputs: Mapping[str, torch.Tensor], axes: Axes) -> Exception | None:
        try:
            self.run(inputs, axes)
        except Exception as error:  # the user's code may raise anything
            return error
        return None


def _num_axes(axes: Axes) -> int:
    return sum(map(len, axes.values()))


def _ambiguous(names: Sequence[str], best: Sequence[Axes]) -> SourceError:
    name = names[0]
    free = sorted({axes[name][1] for axes in best if len(axes[name]) > 1})
    one_of = ", ".join(f"axes={{{name!r}: (0, {axis})}}" for axis in free)
    return SourceError(
        f"forward runs with other sizes of axis {' or '.join(map(str, free))} of {name!r}, and an input has one free "
        f"axis next to the batch: write {one_of}, or axes={{{name!r}: (0,)}} to keep the sizes of the example"
    )


def _no_batch_axis(names: Sequence[str], example: Mapping[str, torch.Tensor], error: Exception) -> SourceError:
    sizes = ", ".join(f"{example[name].shape[0] + 1} for axis 0 of {name!r}" for name in names)
    rows = ", ".join(f"{name!r}: (None,)" for name in names)
    return SourceError(
        f"forward runs on the example but not with another size of its batch ({sizes}), at {line_of_error(error)}: "
        f"{error_summary(error)}. Take the batch from x.shape[0]; if forward takes one row without a batch axis, write "
        f"axes={{{rows}}}, with its time axis after None where one is free"
    )
