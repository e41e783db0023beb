"""Key/value caches: buffers that grow and shrink with the need, and rows that move.

A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot *j* of a row holds the
row's token *j*, so a row of length *n* uses slots 0 … n-1 and what lies beyond is never read. On the CPU the buffers
are numpy arrays that onnxruntime reads and writes directly. On another device they stay there between steps; growing,
joining and moving rows pass through the host for now.

Buffers have room for more rows and slots than are in use, so that most changes move little: a row that leaves makes
room for one that comes. They are made anew when the room is too small, or four times what is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer_runtime.manifest import SLOT, Cache
from tformer_runtime.memory import Budget, Share
from tformer_runtime.session import Array, Session

BLOCK = 32  # slots of the first buffers; they double from there
SPARE = 4  # buffers of more than so many times the need are given back


def slots_for(need: int, most: int) -> int:
    """The slots that a buffer has for `need` of them: BLOCK doubled as often as it takes, and no more than `most`."""
    room = BLOCK
    while room < need:
        room *= 2
    return max(need, min(room, most))


def bytes_of(specs: Sequence[Cache], rows: int, slots: int) -> int:
    """Bytes of the buffers of all cached tensors for so many rows and slots."""
    total = 0
    for spec in specs:
        sizes = [slots if size == SLOT else int(size) for size in spec.shape[1:]]
        sides = 1 if spec.in_place else 2
        total += sides * rows * int(np.prod(sizes)) * np.dtype(spec.dtype).itemsize
    return total


@dataclass
class _Slab:
    """Cached tensors of one shape, in one array (tensors, room, …) so that they grow and move in one go.

    arrays: one for each side, past and present, or one for both; None on another device, where `values` hold the
    tensors. values[side][k]: the OrtValue of tensor k's rows.
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
    what `turn` counts. Bytes are taken from `budget` before they are held, and given back by `release`.
    """

    def __init__(
        self, session: Session, specs: Sequence[Cache], max_length: int, rows: int, budget: Share | None = None
    ) -> None:
        self._session, self._specs, self._max_length = session, specs, max_length
        self._budget = budget or Budget().share()
        self.rows = rows
        self.room = 0  # rows that the buffers have, on the host
        self.capacity = 0  # slots that they have
        self.turn = 0
        self.turns = 1 if all(spec.in_place for spec in specs) else 2
        self.nbytes = 0
        groups: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            groups.setdefault((spec.dtype, spec.shape, spec.in_place), []).append(k)
        self._slabs = []
        for members in groups.values():
            sides = 1 if specs[members[0]].in_place else 2
            self._slabs.append(_Slab(specs[members[0]], members, [None] * sides, [[] for _ in range(sides)]))

    def past(self, turn: int) -> list[Any]:
        """The OrtValues to bind as past, in the order of the manifest's caches."""
        values: list[Any] = [None] * len(self._specs)
        for slab in self._slabs:
            for k, value in zip(slab.members, slab.values[turn % len(slab.values)], strict=True):
                values[k] = value
        return values

    def present(self, turn: int) -> list[Any]:
        return self.past(turn + 1)

    def reserve(self, slots: int, used: int) -> bool:
        """Make room for `slots` slots a row, keeping the first `used`. True if there are new buffers to bind."""
        if slots <= self.capacity:
            return False
        self._remake(np.arange(self.rows), max(self.rows, self.room), slots_for(slots, self._max_length), used)
        return True

    def reorder(self, rows: Array, used: int) -> None:
        """Row i becomes what row rows[i] was, in its first `used` slots. Rows may repeat, be fewer or be more.

        Copies the rows that move; all of them where the buffers have no room for as many.
        """
        before, count = self.rows, len(rows)
        self.rows = count
        if not self.capacity:
            return
        if count > self.room or not self._on_host:
            self._remake(rows, count, self.capacity, used)
            return
        moved = np.flatnonzero(rows != np.arange(count))
        if moved.size:
            for slab in self._slabs:
                live = self._live(slab)[_part(slab.axis, used)]
                live[:, moved] = live[:, rows[moved]]  # the right-hand side is a copy before anything is written
        if count != before:
            self._bind()

    def join(self, other: KVCache, used: int, others: int) -> None:
        """Append the other's rows. used, others: how many slots of each are in use. The other is released.

        Copies the other's rows, and its own where the buffers are too small, or far too large.
        """
        before, rows, slots = self.rows, self.rows + other.rows, max(used, others)
        self._budget.give(other.nbytes)  # what moves over is counted once
        other.nbytes = 0
        wasteful = self.room > SPARE * rows or self.capacity > SPARE * max(slots, BLOCK)
        self.rows = rows
        if self.room < rows or self.capacity < slots or wasteful or not self._on_host:
            self._remake(np.arange(before), rows, slots_for(slots, self._max_length), used, bind=False)
        for slab, theirs in zip(self._slabs, other._slabs, strict=True):
            part = _part(slab.axis, others)
            self._live(slab)[:, before:rows][part] = other._live(theirs)[:, : other.rows][part]
        other.release()
        self._bind()

    def fit(self, used: int) -> bool:
        """Give back the room beyond the rows and their first `used` slots. False if there is none to speak of."""
        slots = slots_for(used, self._max_length)
        if not self.capacity or (self.room == self.rows and self.capacity <= slots):
            return False
        self._remake(np.arange(self.rows), self.rows, min(slots, self.capacity), min(used, self.capacity))
        return True

    def copy(self, rows: Array, used: int, budget: Share | None = None) -> KVCache:
        """A cache of its own, whose row i is what row rows[i] is here, in its first `used` slots."""
        other = KVCache(self._session, self._specs, self._max_length, len(rows), budget)
        if self.capacity:
            lives = [self._live(slab) for slab in self._slabs]
            other._remake(rows, len(rows), slots_for(used, self._max_length), used, lives)
        return other

    def release(self) -> None:
        """Give the buffers and their bytes back."""
        for slab in self._slabs:
            slab.arrays, slab.values = [None] * len(slab.arrays), [[] for _ in slab.values]
        self._budget.give(self.nbytes)
        self.nbytes = self.room = self.capacity = 0

    @property
    def _on_host(self) -> bool:
        return self._session.device == "cpu"

    def _live(self, slab: _Slab) -> Array:
        """The side that the next step reads, on the host."""
        side = self.turn % len(slab.arrays)
        held = slab.arrays[side]
        if held is None:
            held = slab.arrays[side] = np.stack([value.numpy() for value in slab.values[side]])
        return held

    def _remake(
        self, rows: Array, room: int, slots: int, used: int, lives: Sequence[Array] | None = None, bind: bool = True
    ) -> None:
        """New buffers for `room` rows and `slots` slots; row i becomes what row rows[i] was, here or in `lives`."""
        held = bytes_of(self._specs, room, slots)
        self._budget.take(held - self.nbytes)
        self.nbytes = held
        if lives is None and self.capacity:
            lives = [self._live(slab) for slab in self._slabs]
        self.room, self.capacity = room, slots
        for k, slab in enumerate(self._slabs):
            sizes = [slots if size == SLOT else int(size) for size in slab.spec.shape[1:]]
            shape = (len(slab.members), room, *sizes)
            slab.arrays = [np.zeros(shape, slab.spec.dtype) for _ in slab.arrays]
            if lives and used:
                part = _part(slab.axis, used)
                self._live(slab)[:, : len(rows)][part] = lives[k][part][:, rows]
        if bind:
            self._bind()

    def _bind(self) -> None:
        """Make the OrtValues of the rows anew. On another device they take the place of the arrays."""
        for slab in self._slabs:
            for side, array in enumerate(slab.arrays):
                if array is None:  # on the device, and unchanged
                    continue
                slab.values[side] = [self._session.tensor(tensor[: self.rows]) for tensor in array]
            if not self._on_host:
                slab.arrays = [None] * len(slab.arrays)


def _part(axis: int, used: int) -> tuple[slice, ...]:
    """Of an array (tensors, rows, …), the first `used` slots, which are on `axis`."""
    return (slice(None),) * axis + (slice(0, used),)
