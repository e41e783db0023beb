"""Key/value caches: buffers that grow and shrink with the need, and rows that move.

A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot *j* of a row holds the
row's token *j*, so a row of length *n* uses slots 0 … n-1 and what lies beyond is never read. On the CPU the buffers
are numpy arrays that onnxruntime reads and writes directly. On another device they stay there between steps; growing,
joining and moving rows pass through the host for now.

Rows that move are copied from where they differ: every slot bears a number of who wrote it when, so that beams, which
have most of their past in common, copy little.

Buffers have room for more rows and slots than are in use, so that most changes move little: a row that leaves makes
room for one that comes. They are made anew when the room is too small, or four times what is needed. Where it is known
what rows come to, buffers are no larger, and have room for all of it at once if that is not far more than a prompt
takes, whose copy would cost as much as several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer_runtime.backend.cuda_graphs import BufferPool, BufferSet
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.engine.memory_budget import Budget, Share
from tformer_runtime.format.dtypes import held_as
from tformer_runtime.format.manifest import SLOT, Cache

BLOCK = 32  # slots of the first buffers; they double from there
SPARE = 4  # buffers of more than so many times the need are given back
AHEAD = 8  # one slot more for every so many, where rows are known to go on


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
        total += sides * rows * int(np.prod(sizes)) * held_as(spec.dtype).itemsize
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

    nbytes = 0

    def __init__(
        self,
        session: Session,
        specs: Sequence[Cache],
        max_length: int,
        rows: int,
        budget: Share | None = None,
        most: Sequence[int] | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """pool: where buffers come from that CUDA graphs are captured with. most: slots that each row comes to use, if
        that is known. CUDA graphs are captured for buffers of a size, so that those of a GPU have few sizes instead."""
        self._session, self._specs, self._max_length, self._pool = session, specs, max_length, pool
        self._mosts: Ints | None = np.array(most, np.int64) if most is not None and self._on_host else None
        self._budget = budget or Budget().share()
        self.rows = rows
        self.room = 0  # rows that the buffers have, on the host
        self.capacity = 0  # slots that they have
        self.turn = 0
        self.turns = 1 if all(spec.in_place for spec in specs) else 2
        self._written: Ints = np.zeros((0, 0), np.int64)  # (room, capacity): equal numbers at a slot, equal contents
        self._writes = 0
        groups: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            groups.setdefault((spec.dtype, spec.shape, spec.in_place), []).append(k)
        self.pooled: BufferSet | None = None  # buffers that graphs are captured with
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

    def wrote(self, lengths: Ints, new: int) -> None:
        """Note that each row has read so many new tokens behind those that it had. lengths: (rows,) of the latter."""
        for row, first in enumerate(lengths.tolist()):  # 0.25 µs a row; indexing by arrays, ten in all
            self._writes += 1
            self._written[row, first : first + new] = self._writes

    def reserve(self, slots: int, used: int) -> bool:
        """Make room for `slots` slots a row, keeping the first `used`. True if there are new buffers to bind."""
        if slots <= self.capacity:
            return False
        self._remake(np.arange(self.rows), self._fitting(self.rows, slots, self._mosts), used)
        self._bind()
        return True

    def reorder(self, rows: Array, lengths: Array) -> bool:
        """Row i becomes what row rows[i] was. Rows may repeat, be fewer or be more. True if there are new buffers to
        bind. lengths: the slots in use of each row as it was.

        Copies what is in use of the rows that move, from where they differ from what they become; all of all rows where
        the buffers have no room for as many, or far too much.
        """
        used = int(lengths[rows].max(initial=0))
        before, mosts = self.rows, None if self._mosts is None else self._mosts[rows]
        fitting = self._fitting(len(rows), used, mosts)
        if fitting != (self.room, self.capacity) or not self._on_host:
            self._remake(rows, fitting, used)
        else:
            moved = np.flatnonzero(rows != np.arange(len(rows)))
            if moved.size:
                self._move(moved, rows[moved], lengths)
            if len(rows) == before:
                self._mosts = mosts
                return False
        self.rows, self._mosts = len(rows), mosts
        self._bind()
        return True

    def _move(self, to: Ints, sources: Ints, lengths: Ints) -> None:
        """Rows `to` become what rows `sources` were, in place. lengths: the slots in use of each row as it was."""
        ends = lengths[sources]
        if not ends.any():
            return
        were, become = (self._written[rows, : ends.max()] for rows in (to, sources))
        differ = were != become
        begins = np.where(differ.any(1), differ.argmax(1), ends)
        for slab in self._slabs:
            parts = [
                (slice(None),) * (slab.axis - 1) + (slice(begin, end),)
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
            move(self._live(slab).swapaxes(0, 1), to, sources, parts)
        self._written[to, : ends.max()] = become

    def join(self, other: KVCache, used: int, others: int) -> None:
        """Append the other's rows. used, others: how many slots of each are in use. The other is released.

        Copies the other's rows, and its own where the buffers are too small, or far too large.
        """
        before, rows = self.rows, self.rows + other.rows
        known = self._mosts is not None and other._mosts is not None
        mosts = np.concatenate([self._mosts, other._mosts]) if known else None
        fitting = self._fitting(rows, max(used, others), mosts)
        self._budget.give(other.nbytes)  # what moves over is counted once
        other.nbytes = 0
        if fitting != (self.room, self.capacity) or not self._on_host:
            self._remake(np.arange(before), fitting, used)
        for slab, theirs in zip(self._slabs, other._slabs, strict=True) if others else ():
            part = _part(slab.axis, others)
            self._live(slab)[:, before:rows][part] = other._live(theirs)[:, : other.rows][part]
        if others:
            self._written[before:rows, :others] = other._written[: other.rows, :others] + self._writes
            self._writes += other._writes
        other.release()
        self.rows, self._mosts = rows, mosts
        self._bind()

    def fit(self, used: int) -> bool:
        """Give back the room beyond the rows and their first `used` slots. False if there is none to speak of."""
        slots = self._slots(used, self._mosts)
        if not self.capacity or (self.room == self.rows and self.capacity <= slots):
            return False
        self._remake(np.arange(self.rows), (self.rows, min(slots, self.capacity)), min(used, self.capacity))
        self._bind()
        return True

    def copy(self, rows: Array, used: int, budget: Share | None = None, most: Sequence[int] | None = None) -> KVCache:
        """A cache of its own, whose row i is what row rows[i] is here, in its first `used` slots. most: as at first."""
        other = KVCache(self._session, self._specs, self._max_length, len(rows), budget, most, self._pool)
        lives = [self._live(slab) for slab in self._slabs] if used else []
        other._remake(rows, other._fitting(len(rows), used, other._mosts), used, lives)
        if used:
            other._written[: len(rows), :used] = self._written[rows, :used]
            other._writes = self._writes
        other._bind()
        return other

    def release(self) -> None:
        """Give the buffers and their bytes back."""
        self._unpool()
        for slab in self._slabs:
            slab.arrays, slab.values = [None] * len(slab.arrays), [[] for _ in slab.values]
        self._budget.give(self.nbytes)
        self.nbytes = self.room = self.capacity = 0

    def __del__(self) -> None:
        if self.nbytes:  # not when an interrupt came before there was anything to give back
            self.release()

    @property
    def _on_host(self) -> bool:
        return self._session.device == "cpu"

    def _fitting(self, rows: int, slots: int, mosts: Ints | None) -> tuple[int, int]:
        """The room and the capacity for so many rows and slots: those there are, unless they are too small or more
        than SPARE times the need. mosts: slots that each row comes to use."""
        room = self.room if self._on_host and rows <= self.room <= SPARE * rows else rows
        if not slots and not self.capacity:  # nothing has been read yet
            return room, 0
        fits = slots <= self.capacity <= SPARE * max(slots, BLOCK)
        return room, self.capacity if fits else self._slots(slots, mosts)

    def _slots(self, need: int, mosts: Ints | None) -> int:
        """That buffers are made with: never more than the rows come to use, if they do not come to more than was said.

        Where the rows come to few, all of them are there at once: to grow thrice took 3 ms of 230, of a prompt of 16
        tokens and 64 steps (134 M weights)."""
        most = 0 if mosts is None else int(mosts.max(initial=0))
        if need > most:
            return slots_for(need, self._max_length)
        if most <= SPARE * max(need, BLOCK) and self.turns == 1:  # others are copied at each step
            return most
        return slots_for(min(need + need // AHEAD, most), most)

    def _live(self, slab: _Slab) -> Array:
        """The side that the next step reads, on the host: the array itself, or a copy of what is on the device."""
        side = self.turn % len(slab.arrays)
        held = slab.arrays[side]
        if held is None:
            held = np.stack([value.numpy() for value in slab.values[side]])
        return held

    def _remake(self, rows: Array, fitting: tuple[int, int], used: int, lives: Sequence[Array] | None = None) -> None:
        """New buffers, to be bound: row i becomes what row rows[i] was, here or in `lives`, in its first slots."""
        held = bytes_of(self._specs, *fitting)
        self._budget.take(held - self.nbytes)
        self.nbytes = held
        if lives is None and used:
            lives = [self._live(slab) for slab in self._slabs]
        written = np.zeros(fitting, np.int64)
        if used and len(self._written):
            written[: len(rows), :used] = self._written[rows, :used]
        self.room, self.capacity, self._written = *fitting, written
        for k, slab in enumerate(self._slabs):
            sizes = [self.capacity if size == SLOT else int(size) for size in slab.spec.shape[1:]]
            shape = (len(slab.members), self.room, *sizes)
            slab.arrays = [np.zeros(shape, held_as(slab.spec.dtype)) for _ in slab.arrays]
            if lives and used:
                part = _part(slab.axis, used)
                self._live(slab)[:, : len(rows)][part] = lives[k][part][:, rows]

    def _bind(self) -> None:
        """Make the OrtValues of the rows anew. On another device they take the place of the arrays."""
        self._unpool()
        # What is pooled stays when it is given back, so that a budget would not be kept.
        if self._pool is not None and self.turns == 1 and self.capacity and self._budget.limit is None:
            arrays = [slab.arrays[0] for slab in self._slabs]
            self.pooled = self._pool.acquire(self.rows, self.capacity, [a for a in arrays if a is not None])
        if self.pooled is not None:
            for slab, values in zip(self._slabs, self.pooled.values, strict=True):
                slab.values, slab.arrays = [values], [None]
            return
        for slab in self._slabs:
            for side, array in enumerate(slab.arrays):
                if array is not None:
                    slab.values[side] = [self._session.tensor(tensor[: self.rows]) for tensor in array]
            if not self._on_host:
                slab.arrays = [None] * len(slab.arrays)

    def _unpool(self) -> None:
        if self.pooled is not None:
            assert self._pool is not None
            self._pool.release(self.pooled)
            self.pooled = None


def move(array: Array, to: Array, sources: Array, parts: Sequence[tuple[slice, ...]] = ()) -> None:
    """Rows `to` of (rows, …) become what rows `sources` were. parts: what has to be copied for each, if not all.

    Each row is copied once, from whom it continues, in an order in which nothing is overwritten that is still to be
    read; of rows that change places in a circle, one is put aside.
    """
    left = dict(zip(to.tolist(), sources.tolist(), strict=True))
    part_of = dict(zip(left, parts, strict=False))
    readers = Counter(left.values())
    ready = [row for row in left if not readers[row]]
    aside: dict[int, Array] = {}
    while left:
        if not ready:
            row = next(iter(left))
            aside[row] = array[row].copy()
            ready.append(row)
        row = ready.pop()
        source = left.pop(row)
        own = part_of.get(row, ...)
        array[row][own] = aside.get(source, array[source])[own]
        readers[source] -= 1
        if not readers[source] and source in left and source not in aside:
            ready.append(source)


def _part(axis: int, used: int) -> tuple[slice, ...]:
    """Of an array (tensors, rows, …), the first `used` slots, which are on `axis`."""
    return (slice(None),) * axis + (slice(0, used),)
