"""Extra outputs of each step, which a finished sequence collects although rows moved between the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.sizes import Sizes


class StepHistory:
    """The extra outputs of one row at one step, with a link to the step before.

    Rows that continue the same sequence share its steps. Steps that no row continues are freed.
    """

    __slots__ = ("previous", "values")

    def __init__(self, previous: StepHistory | None, values: Mapping[str, Array]) -> None:
        self.previous, self.values = previous, values

    def stack_steps(self, length: int, sizes: Sizes, shapes: Mapping[str, tuple[int | str, ...]]) -> dict[str, Array]:
        """Return name → (length, …), the values of the last `length` steps, each cut to the row's sizes.

        shapes: shape of one row's value at one step, by name, with the names of free axes.
        """
        stacks: dict[str, list[Array]] = {name: [] for name in self.values}
        step: StepHistory | None = self
        for _ in range(length):
            assert step is not None
            for name, values in stacks.items():
                values.append(crop(sizes, shapes[name], step.values[name]))
            step = step.previous
        return {name: np.stack(values[::-1]) for name, values in stacks.items()}


def crop(sizes: Sizes, shape: tuple[int | str, ...], value: Array) -> Array:
    """Return a row's value without padding: each axis that `shape` names after an input's axis gets the row's size."""
    return value[tuple(slice(0, sizes.get(axis) if isinstance(axis, str) else None) for axis in shape)]
