"""What each step gave beside its logits, found again for a finished sequence although rows moved meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tformer_runtime.requests import Sizes
from tformer_runtime.sampling import Ints
from tformer_runtime.session import Array


class Record:
    """Every step's values, and where each row came from. Memory is that of all steps of all rows."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Array]] = []
        self._origins: list[Ints | None] = []  # after step t, row i became what row _origins[t][i] was; None: no move

    def add(self, values: Mapping[str, Array]) -> None:
        """A step's values by name, (rows, …) each."""
        self._steps.append({name: value.copy() for name, value in values.items()})
        self._origins.append(None)

    def moved(self, rows: Ints) -> None:
        """Row i becomes what row rows[i] was."""
        if self._origins:
            before = self._origins[-1]
            self._origins[-1] = rows if before is None else before[rows]

    def trail(self, length: int, place: int) -> dict[str, Array]:
        """(length, …) by name: of the sequence that was in row `place` at step `length`, each step's value."""
        found: dict[str, list[Array]] = {name: [] for name in self._steps[0]}
        for step in reversed(range(length)):
            for name, values in found.items():
                values.append(self._steps[step][name][place])
            origin = self._origins[step - 1] if step else None
            place = place if origin is None else int(origin[place])
        return {name: np.stack(values[::-1]) for name, values in found.items()}


def cut_to(sizes: Sizes, shape: tuple[int | str, ...], value: Array) -> Array:
    """A row's value without padding: each axis that `shape` names as one of an input has the row's own size."""
    return value[tuple(slice(0, sizes.get(axis) if isinstance(axis, str) else None) for axis in shape)]
