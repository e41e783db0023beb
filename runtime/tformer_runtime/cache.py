"""Key/value caches: buffers that grow with the need, and rows that move.

A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot *j* of a row holds the
row's token *j*, so a row of length *n* uses slots 0 … n-1 and what lies beyond is never read. On the CPU the buffers
are numpy arrays that onnxruntime reads and writes directly. On another device they stay there between steps; growing
and moving rows pass through the host for now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer_runtime.manifest import SLOT, Cache
from tformer_runtime.session import Array, Session

BLOCK = 32  # slots of the first buffers; they double from there


def move_rows(array: Array, rows: Array, axis: int = 0, used: int = 0) -> Array:
    """The array with row i taken from row rows[i]; of `axis`, if not 0, only the first `used` slots are moved.

    As many rows or fewer are moved inside the array, and the result is a view of its first rows; more need a new one.
    """
    part = (slice(None),) * axis + (slice(0, used),) if axis else ()
    if len(rows) > len(array):
        more = np.zeros((len(rows), *array.shape[1:]), array.dtype)
        more[part] = array[part][rows]
        return more
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    if moved.size:
        live = array[part]
        live[moved] = live[rows[moved]]  # the right-hand side is a copy before anything is written
    return array[: len(rows)]


class KVCache:
    """The buffers of every cached tensor for the rows of one batch.

    past[turn] and present[turn] are the OrtValues to bind, in the order of the manifest's caches. Tensors written in
    place have one buffer; if any has not, past and present swap roles with each step, which is what `turn` counts.
    """

    def __init__(self, session: Session, specs: Sequence[Cache], max_length: int, rows: int) -> None:
        self._session = session
        self._specs = tuple(specs)
        self._axes = [spec.shape.index(SLOT) for spec in specs]
        self._max_length = max_length
        self._rows = rows
        self.capacity = 0
        self.turn = 0
        self.turns = 1 if all(spec.in_place for spec in specs) else 2
        self._values: list[list[Any]] = [[None] * (1 if spec.in_place else 2) for spec in specs]
        self._arrays: list[list[Array | None]] = [[None] * len(sides) for sides in self._values]

    def past(self, turn: int) -> list[Any]:
        return [sides[turn % len(sides)] for sides in self._values]

    def present(self, turn: int) -> list[Any]:
        return self.past(turn + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(v.tensor_size_in_bytes()) for sides in self._values for v in sides if v is not None)

    def reserve(self, slots: int, used: int) -> bool:
        """Make room for `slots` slots a row, keeping the first `used`. True if there are new buffers to bind."""
        if slots <= self.capacity:
            return False
        room = max(self.capacity, BLOCK)
        while room < slots:
            room *= 2
        self.capacity = max(slots, min(room, self._max_length))
        self._change(lambda spec, axis, old: self._grown(spec, axis, old, used))
        return True

    def reorder(self, rows: Array, used: int) -> None:
        """Row i becomes what row rows[i] was, in its first `used` slots. Rows may repeat, be fewer or be more."""
        self._rows = len(rows)
        if self.capacity:
            self._change(lambda _, axis, old: old if old is None else move_rows(old, rows, axis, used))

    def _grown(self, spec: Cache, axis: int, old: Array | None, used: int) -> Array:
        sizes = [self.capacity if name == SLOT else size for name, size in zip(spec.shape, spec.shape, strict=True)]
        new: Array = np.zeros([self._rows, *(int(size) for size in sizes[1:])], spec.dtype)
        if old is not None and used:
            part = (slice(None),) * axis + (slice(0, used),)
            new[part] = old[part]
        return new

    def _change(self, change: Callable[[Cache, int, Array | None], Array | None]) -> None:
        """Replace each buffer's array by what `change` makes of it, and renew the OrtValue where that is another."""
        on_host = self._session.device == "cpu"
        for spec, axis, values, arrays in zip(self._specs, self._axes, self._values, self._arrays, strict=True):
            for side, value in enumerate(values):
                old = arrays[side] if on_host or value is None else value.numpy()
                new = change(spec, axis, old)
                if new is not None and (new is not old or not on_host):
                    arrays[side] = new if on_host else None
                    values[side] = self._session.tensor(new)
