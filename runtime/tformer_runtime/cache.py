"""Key/value caches: buffers that grow with the need, and rows that move.

A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot *j* of a row holds the
row's token *j*, so a row of length *n* uses slots 0 … n-1 and what lies beyond is never read. On the CPU the buffers
are numpy arrays that onnxruntime reads and writes directly. On another device they stay there between steps; growing
and moving rows pass through the host for now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer_runtime.manifest import SLOT, Cache
from tformer_runtime.session import Array, Session

BLOCK = 32  # slots of the first buffers; they double from there


def move_rows(slab: Array, rows: Array, axis: int = 0, used: int = 0) -> Array:
    """Tensors stacked on axis 0, rows on axis 1: row i of each becomes row rows[i].

    axis: the axis whose first `used` slots are all that need to move; 0 for none. As many rows or fewer are moved
    inside the slab and the result is a view of its first rows; more rows need a new one.
    """
    part = (slice(None),) * axis + (slice(0, used),) if axis else (slice(None),)
    if len(rows) > slab.shape[1]:
        more = np.zeros((len(slab), len(rows), *slab.shape[2:]), slab.dtype)
        more[part] = slab[part][:, rows]
        return more
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    if moved.size:
        live = slab[part]
        live[:, moved] = live[:, rows[moved]]  # the right-hand side is a copy before anything is written
    return slab[:, : len(rows)]


@dataclass
class _Slab:
    """Cached tensors of one shape, in one array (tensors, rows, …) so that they grow and move in one go.

    arrays: one for each side, past and present, or one for both; None on another device. values[side][k]: the
    OrtValue of tensor k.
    """

    spec: Cache
    members: list[int]
    arrays: list[Array | None]
    values: list[list[Any]]

    @property
    def axis(self) -> int:
        """Of the slots, in the array."""
        return self.spec.shape.index(SLOT) + 1


class KVCache:
    """The buffers of every cached tensor for the rows of one batch.

    Tensors written in place have one buffer; if any has not, past and present swap roles with each step, which is
    what `turn` counts.
    """

    def __init__(self, session: Session, specs: Sequence[Cache], max_length: int, rows: int) -> None:
        self._session = session
        self._max_length = max_length
        self._rows = rows
        self._count = len(specs)
        self._slabs: list[_Slab] = []
        self.capacity = 0
        self.turn = 0
        self.turns = 1 if all(spec.in_place for spec in specs) else 2
        groups: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            groups.setdefault((spec.dtype, spec.shape, spec.in_place), []).append(k)
        for members in groups.values():
            sides = 1 if specs[members[0]].in_place else 2
            self._slabs.append(_Slab(specs[members[0]], members, [None] * sides, [[] for _ in range(sides)]))

    def past(self, turn: int) -> list[Any]:
        """The OrtValues to bind as past, in the order of the manifest's caches."""
        values: list[Any] = [None] * self._count
        for slab in self._slabs:
            for k, value in zip(slab.members, slab.values[turn % len(slab.values)], strict=True):
                values[k] = value
        return values

    def present(self, turn: int) -> list[Any]:
        return self.past(turn + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' buffers."""
        values = (value for slab in self._slabs for side in slab.values for value in side)
        return sum(int(value.tensor_size_in_bytes()) for value in values)

    def reserve(self, slots: int, used: int) -> bool:
        """Make room for `slots` slots a row, keeping the first `used`. True if there are new buffers to bind."""
        if slots <= self.capacity:
            return False
        room = max(self.capacity, BLOCK)
        while room < slots:
            room *= 2
        self.capacity = max(slots, min(room, self._max_length))
        self._change(lambda slab, old: self._grown(slab, old, used))
        return True

    def reorder(self, rows: Array, used: int) -> None:
        """Row i becomes what row rows[i] was, in its first `used` slots. Rows may repeat, be fewer or be more."""
        self._rows = len(rows)
        if self.capacity:
            self._change(lambda slab, old: old if old is None else move_rows(old, rows, slab.axis, used))

    def _grown(self, slab: _Slab, old: Array | None, used: int) -> Array:
        sizes = [self.capacity if size == SLOT else int(size) for size in slab.spec.shape[1:]]
        new: Array = np.zeros((len(slab.members), self._rows, *sizes), slab.spec.dtype)
        if old is not None and used:
            part = (slice(None),) * slab.axis + (slice(0, used),)
            new[part] = old[part]
        return new

    def _change(self, change: Callable[[_Slab, Array | None], Array | None]) -> None:
        """Replace each slab's array by what `change` makes of it, and renew the OrtValues where that is another."""
        on_host = self._session.device == "cpu"
        for slab in self._slabs:
            for side, values in enumerate(slab.values):
                old = slab.arrays[side]
                if old is None and values:  # on another device
                    old = np.stack([value.numpy() for value in values])
                new = change(slab, old)
                if new is None or (on_host and new is old) or (on_host and old is not None and new.shape == old.shape):
                    continue  # moved in place
                slab.arrays[side] = new if on_host else None
                slab.values[side] = [self._session.tensor(tensor) for tensor in new]
