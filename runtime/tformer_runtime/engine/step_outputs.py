"""What each step gave beside its logits, found again for a finished sequence although rows moved meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.sizes import Sizes


class Trail:
    """One row's values at one step, and its trail before. What no row continues is freed."""

    __slots__ = ("before", "values")

    def __init__(self, before: Trail | None, values: Mapping[str, Array]) -> None:
        self.before, self.values = before, values

    def stacked(self, length: int, sizes: Sizes, shapes: Mapping[str, tuple[int | str, ...]]) -> dict[str, Array]:
        """(length, …) by name: the values of the last `length` steps, each cut to the row's own sizes.

        shapes: of one row's value at one step, free axes by name.
        """
        found: dict[str, list[Array]] = {name: [] for name in self.values}
        trail: Trail | None = self
        for _ in range(length):
            assert trail is not None
            for name, values in found.items():
                values.append(cut_to(sizes, shapes[name], trail.values[name]))
            trail = trail.before
        return {name: np.stack(values[::-1]) for name, values in found.items()}


def cut_to(sizes: Sizes, shape: tuple[int | str, ...], value: Array) -> Array:
    """A row's value without padding: each axis that `shape` names as one of an input has the row's own size."""
    return value[tuple(slice(0, sizes.get(axis) if isinstance(axis, str) else None) for axis in shape)]
