"""Key/value caches: buffers that grow and shrink with the need, and rows that move.

A cache tensor has its batch on axis 0 and its slots on an axis that the manifest names. Slot *j* of a row holds the
row's token *j*, so a row of length *n* uses slots 0 … n-1, and later slots are never read. On the CPU the buffers are
numpy arrays that onnxruntime reads and writes directly. On another device they stay there between steps, but growing
and repeating rows copies them through the host. In a pool's buffers `buffer_rows` says where each row is. There rows
leave or swap places without a copy, and rows that join are written to unused rows.

A cache without slots is a *carry*: a value of fixed size after the row's last token. It is copied whole with its row.
A step reads it from one side and writes it to the other. So the carries before the latest step are still there, and a
row can go back to them (`swap_sides`).

Rows that move are copied from their first difference on. Every slot has the id of the write that filled it, so that
beams, which share most of their past, copy little.

Buffers have more rows and slots than are in use, so that most changes copy little: a new row takes the place of a
finished one. Buffers are reallocated if they are too small, or larger than MAX_BUFFER_RATIO times the need. If the
maximum length of the rows is known, buffers are no larger. They are allocated with all these slots at once if the
prompt fills a good part of them, because growing would copy the prompt at the cost of several steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.backend.cuda_graphs import BufferPool, BufferSet, padded_rows
from tformer_runtime.backend.resident_pages import mapped_zeros
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import OutOfMemoryError
from tformer_runtime.engine.memory_budget import MemoryBudget, MemoryShare
from tformer_runtime.format.dtypes import storage_dtype
from tformer_runtime.format.manifest import SLOT_AXIS, CacheSpec

FIRST_BUFFER_SLOTS = 32  # larger buffers have twice, four times, … as many
MAX_BUFFER_RATIO = 4  # larger multiples of the need are freed
_FEW_ROWS = 8  # for which a loop is faster than index arrays
GROWTH_DIVISOR = 8  # buffers get 1/8 more slots than needed if rows will grow


def buffer_slots(required: int, max_slots: int) -> int:
    """Return the slots of a buffer that needs `required` slots.

    These are FIRST_BUFFER_SLOTS, doubled until they suffice, but at most the greater of `max_slots` and `required`.
    """
    slots = FIRST_BUFFER_SLOTS
    while slots < required:
        slots *= 2
    return max(required, min(slots, max_slots))


def cache_bytes(specs: Sequence[CacheSpec], rows: int, slots: int) -> int:
    """Return the bytes of the buffers of all cached tensors."""
    total = 0
    for spec in specs:
        sizes = [slots if size == SLOT_AXIS else int(size) for size in spec.shape[1:]]
        sides = 1 if spec.in_place else 2
        total += sides * rows * math.prod(sizes) * storage_dtype(spec.dtype).itemsize
    return total


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of zeros. Raise OutOfMemoryError if the machine has less memory, whatever is free of it."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if nbytes > _machine_bytes():
            raise MemoryError  # a system that promises more memory than it has would stop the process later
        return mapped_zeros(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than numpy can count
        raise OutOfMemoryError(
            f"the caches need {nbytes:,} bytes at once, which this machine does not have: ask for fewer beams or "
            "sequences, or for fewer tokens"
        ) from error


@functools.cache
def _machine_bytes() -> int:
    """Return the bytes of the machine's memory; no limit where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


class _TensorGroup(Struct):
    """Cached tensors of one shape, in one array (tensors, row capacity, …), so that they grow and move together.

    members: indices of the tensors in the manifest's list of caches.
    arrays: one for each side, past and present, or one for both. None on other devices, where `values` has the tensors.
    values: values[side][k] is the OrtValue of the rows of tensor k.
    """

    spec: CacheSpec
    members: list[int]
    arrays: list[Array | None]
    values: list[list[Any]]

    def slots(self, begin: int, end: int) -> tuple[slice, ...]:
        """Return the index of some slots in an array (rows, …); of everything for a carry."""
        if self.spec.is_carry:
            return ()
        return (slice(None),) * self.spec.shape.index(SLOT_AXIS) + (slice(begin, end),)

    def copied_slots(self, used: int) -> tuple[slice, ...] | None:
        """Return the index of the first `used` slots in `arrays`; None if rows without tokens have nothing to copy."""
        return (slice(None), *self.slots(0, used)) if used or self.spec.is_carry else None


class KVCache:
    """The buffers of every cached tensor for the rows of one batch.

    A tensor that is written in place has one buffer, other tensors have two sides, past and present. The sides swap
    their roles after each step. Bytes are acquired from `budget` before they are allocated, and `release` returns them.

    row_capacity: the rows of the buffers.
    slot_capacity: the slots of the buffers.
    side: the side that the next step reads as past.
    pooled_buffers: buffers with CUDA graphs, borrowed from the pool; None for buffers of this cache alone.
    buffer_rows: (rows,) the row of the buffers of each row. It is replaced, never changed.
    """

    nbytes = 0

    def __init__(
        self,
        session: Session,
        specs: Sequence[CacheSpec],
        max_length: int,
        rows: int,
        budget: MemoryShare | None = None,
        max_tokens: Sequence[int] | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """Create a cache without slots.

        max_tokens: the expected maximum of tokens of each row, if known. It counts on the CPU only: on a GPU buffers
            have few different sizes, because CUDA graphs are captured for each size.
        pool: source of buffers with CUDA graphs.
        """
        self._session, self._specs, self._max_length, self._pool = session, specs, max_length, pool
        is_limited = max_tokens is not None and self._on_host
        self._max_slots: Ints | None = np.array(max_tokens, np.int64) if is_limited else None
        self._budget = budget or MemoryBudget().new_share()
        self.rows = rows
        self.row_capacity = 0
        self.slot_capacity = 0
        self.side = 0
        self.num_sides = 1 if all(spec.in_place for spec in specs) else 2
        self.has_carries = any(spec.is_carry for spec in specs)
        self.buffer_rows: Ints = np.arange(rows)
        # (rows, slots) on the host: slots with equal ids have equal contents
        self._write_ids: Ints = np.zeros((0, 0), np.int64)
        self._last_write_id = 0
        groups: dict[Any, list[int]] = {}
        for k, spec in enumerate(specs):
            groups.setdefault((spec.dtype, spec.shape, spec.in_place), []).append(k)
        self.pooled_buffers: BufferSet | None = None
        self._groups = []
        for members in groups.values():
            sides = 1 if specs[members[0]].in_place else 2
            self._groups.append(_TensorGroup(specs[members[0]], members, [None] * sides, [[] for _ in range(sides)]))

    @property
    def buffers(self) -> list[Array]:
        """The allocated arrays of all caches and sides."""
        return [array for group in self._groups for array in group.arrays if array is not None]

    def past(self, side: int) -> list[Any]:
        """Return the OrtValues to bind as past, in the order of the manifest's caches."""
        values: list[Any] = [None] * len(self._specs)
        for group in self._groups:
            for k, value in zip(group.members, group.values[side % len(group.values)], strict=True):
                values[k] = value
        return values

    def present(self, side: int) -> list[Any]:
        """Return the OrtValues to bind as present, in the order of the manifest's caches. side: of the past."""
        return self.past(side + 1)

    def record_writes(self, lengths: Ints, new_tokens: int) -> None:
        """Record that a step wrote `new_tokens` slots of each row. lengths: (rows,), the cached tokens before it."""
        if not self._on_host:
            return
        first_id, self._last_write_id = self._last_write_id + 1, self._last_write_id + len(lengths)
        if new_tokens == 1 and len(lengths) > _FEW_ROWS:
            ids = np.arange(first_id, first_id + len(lengths))
            self._write_ids[ids - first_id, lengths] = ids
            return
        for row, first in enumerate(lengths.tolist()):
            self._write_ids[row, first : first + new_tokens] = first_id + row

    def reserve(self, slots: int, used: int) -> bool:
        """Grow the buffers to `slots` slots and keep the first `used`. Return whether there are new buffers to bind."""
        if slots <= self.slot_capacity:
            return False
        self._reallocate(np.arange(self.rows), self._buffer_size(self.rows, slots, self._max_slots), used)
        self._bind()
        return True

    def reorder(self, rows: Array, lengths: Array) -> bool:
        """Replace row i by row rows[i] and return whether there are new buffers to bind.

        Rows may repeat, and be fewer or more than before. Copies the used slots of the rows that move, from their first
        difference on. Copies all rows if the buffers are too small or far too large. Copies nothing in a pool's buffers
        unless rows repeat.

        lengths: the used slots of each row before the call.
        """
        used = int(lengths[rows].max(initial=0))
        rows_before, max_slots = self.rows, None if self._max_slots is None else self._max_slots[rows]
        buffer_size = self._buffer_size(len(rows), used, max_slots)
        is_same_size = buffer_size == (self.row_capacity, self.slot_capacity)
        if self.pooled_buffers is not None and is_same_size and len(np.unique(rows)) == len(rows):
            self.buffer_rows, self.rows = self.buffer_rows[rows], len(rows)
            return False
        if buffer_size != (self.row_capacity, self.slot_capacity) or not self._on_host:
            self._reallocate(rows, buffer_size, used)
        else:
            moved = np.flatnonzero(rows != np.arange(len(rows)))
            if moved.size and self.slot_capacity:
                self._move_in_place(moved, rows[moved], lengths)
            if len(rows) == rows_before:
                self._max_slots = max_slots
                return False
        self.rows, self._max_slots = len(rows), max_slots
        self._bind()
        return True

    def arrange(self, used: int) -> bool:
        """Move row i to row i of the buffers. Return whether there are new buffers to bind. used: the used slots."""
        if (self.buffer_rows == np.arange(self.rows)).all():
            return False
        self._reallocate(np.arange(self.rows), (self.row_capacity, self.slot_capacity), used)
        self._bind()
        return True

    def _move_in_place(self, targets: Ints, sources: Ints, lengths: Ints) -> None:
        """Copy rows `sources` to rows `targets`. lengths: the used slots of each row before the call."""
        ends = lengths[sources]
        used_ids = self._write_ids[:, : ends.max()]
        new_ids = used_ids[sources]
        differs = used_ids[targets] != new_ids
        begins = np.where(differs.any(1), differs.argmax(1), ends) if differs.size else ends
        used = list(zip(begins.tolist(), ends.tolist(), strict=True))
        for group in self._groups:
            parts = [group.slots(begin, end) for begin, end in used]
            move_rows(self._current_array(group).swapaxes(0, 1), targets, sources, parts)
        used_ids[targets] = new_ids

    def join(self, other: KVCache, used: int, other_used: int) -> None:
        """Append the rows of `other` and release it.

        Copies the rows of `other`, and the rows of this cache too if its buffers are too small or far too large, or on
        another device unless they are a pool's.

        used, other_used: the number of used slots of both caches.
        """
        rows_before, rows = self.rows, self.rows + other.rows
        is_limited = self._max_slots is not None and other._max_slots is not None
        max_slots = np.concatenate([self._max_slots, other._max_slots]) if is_limited else None
        buffer_size = self._buffer_size(rows, max(used, other_used), max_slots)
        self._budget.release(other.nbytes)  # the budget counts the moved rows once
        other.nbytes = 0
        if self.pooled_buffers is not None and buffer_size == (self.row_capacity, self.slot_capacity):
            self._join_unused_rows(self.pooled_buffers, other, other_used)
            return
        if buffer_size != (self.row_capacity, self.slot_capacity) or not self._on_host:
            self._reallocate(np.arange(rows_before), buffer_size, used)
        for group, other_group in zip(self._groups, other._groups, strict=True):
            part = group.copied_slots(other_used)
            if part is not None and self.slot_capacity:
                joined = self._current_array(group)[:, rows_before:rows]
                joined[part] = other._current_array(other_group)[:, : other.rows][part] if other.slot_capacity else 0
        if other_used and self._on_host:
            other_ids = other._write_ids[: other.rows, :other_used] + self._last_write_id
            self._write_ids[rows_before:rows, :other_used] = other_ids
            self._last_write_id += other._last_write_id
        other.release()
        self.rows, self._max_slots = rows, max_slots
        self._bind()

    def _join_unused_rows(self, buffers: BufferSet, other: KVCache, used: int) -> None:
        """Write the rows of `other` to unused rows of the buffers. used: the number of used slots of `other`.

        All slots of the rows are written, because attention may multiply an unused slot by 0.
        """
        places = np.setdiff1d(np.arange(buffers.rows), self.buffer_rows)[: other.rows]
        runs = np.split(np.arange(other.rows), np.flatnonzero(np.diff(places) != 1) + 1)
        for group, other_group, values in zip(self._groups, other._groups, buffers.values, strict=True):
            sizes = [self.slot_capacity if size == SLOT_AXIS else int(size) for size in group.spec.shape[1:]]
            new_rows = _zeros((len(values), other.rows, *sizes), storage_dtype(group.spec.dtype))
            part = group.copied_slots(used)
            if part is not None and other.slot_capacity:
                new_rows[part] = other._current_array(other_group)[:, : other.rows][part]
            for value, tensor in zip(values, new_rows, strict=True):
                for run in runs:
                    view = self._session.row_view(value, int(places[run[0]]), int(places[run[-1]]) + 1)
                    self._session.write_tensor(view, tensor[run[0] : run[-1] + 1])
        self.buffer_rows = np.concatenate([self.buffer_rows, places])
        self.rows += other.rows
        other.release()

    def fit(self, used: int) -> bool:
        """Shrink the buffers to the rows and their first `used` slots. Return False if they are not larger."""
        slots = self._new_slots(used, self._max_slots)
        rows = self._new_rows(self.rows)
        if not self.slot_capacity or (self.row_capacity == rows and self.slot_capacity <= slots):
            return False
        buffer_size = rows, min(slots, self.slot_capacity)
        self._reallocate(np.arange(self.rows), buffer_size, min(used, self.slot_capacity))
        self._bind()
        return True

    def copy(
        self, rows: Array, used: int, budget: MemoryShare | None = None, max_tokens: Sequence[int] | None = None
    ) -> KVCache:
        """Return a new cache whose row i is a copy of row rows[i], in its first `used` slots."""
        other = KVCache(self._session, self._specs, self._max_length, len(rows), budget, max_tokens, self._pool)
        sources = [self._current_array(group) for group in self._groups] if used else []
        other._reallocate(rows, other._buffer_size(len(rows), used, other._max_slots), used, sources)
        if used and self._on_host:
            other._write_ids[: len(rows), :used] = self._write_ids[rows, :used]
            other._last_write_id = self._last_write_id
        other._bind()
        return other

    def swap_sides(self) -> None:
        """Go back to the side that the latest step read. No row may have moved or joined since."""
        self.side = (self.side - 1) % self.num_sides

    def clear(self) -> None:
        """Set all caches to zeros, as for rows without tokens. `past` and `present` have to be bound again."""
        if self.slot_capacity:
            self._reallocate(np.arange(self.rows), (self.row_capacity, self.slot_capacity), 0)
            self._bind()

    @property
    def may_be_kept(self) -> bool:
        """Whether another cache may get the buffers (`detach`)."""
        return self._on_host and self.num_sides == 1 and self.pooled_buffers is None and self.slot_capacity > 0

    def fits(self, rows: int, slots: int) -> bool:
        """Return whether the buffers are the right ones for so many rows and slots."""
        max_slots = MAX_BUFFER_RATIO * max(slots, FIRST_BUFFER_SLOTS)
        return rows == self.rows == self.row_capacity and slots <= self.slot_capacity <= max_slots

    def detach(self) -> KVCache:
        """Return a cache with the buffers of this one, which is released. No budget counts its bytes until `attach`."""
        other = KVCache.__new__(KVCache)
        other.__dict__.update(self.__dict__, nbytes=0)
        self._groups = [
            _TensorGroup(group.spec, group.members, [None] * len(group.arrays), [[] for _ in group.values])
            for group in self._groups
        ]
        self.release()
        return other

    def attach(self, budget: MemoryShare, max_tokens: Sequence[int]) -> None:
        """Use the buffers of a detached cache for new rows without tokens. Arguments: see the constructor."""
        nbytes = sum(array.nbytes for array in self.buffers)
        budget.acquire(nbytes)
        self._budget, self.nbytes, self._max_slots = budget, nbytes, np.array(max_tokens, np.int64)
        for array in self.buffers:
            array.fill(0)  # attention may multiply an unused slot by 0, and the rows before may have left a NaN there
        self._write_ids[:] = self._last_write_id = 0

    def release(self) -> None:
        """Free the buffers and their bytes in the budget."""
        self._return_to_pool()
        for group in self._groups:
            group.arrays, group.values = [None] * len(group.arrays), [[] for _ in group.values]
        self._budget.release(self.nbytes)
        self.nbytes = self.row_capacity = self.slot_capacity = 0

    def __del__(self) -> None:
        if self.nbytes:  # 0 if an interrupt ended the constructor
            self.release()

    @property
    def _on_host(self) -> bool:
        return self._session.device == "cpu"

    def _buffer_size(self, rows: int, slots: int, max_slots: Ints | None) -> tuple[int, int]:
        """Return the row capacity and slot capacity for `rows` rows and `slots` slots.

        These are the present capacities, unless they are too small or more than MAX_BUFFER_RATIO times the need.

        max_slots: the expected maximum of slots of each row, if known.
        """
        may_keep_rows = self._on_host or self.pooled_buffers is not None
        keeps_rows = may_keep_rows and rows <= self.row_capacity <= MAX_BUFFER_RATIO * rows
        row_capacity = self.row_capacity if keeps_rows else self._new_rows(rows)
        if not slots and not self.slot_capacity:  # before the first step
            return row_capacity, 0
        keeps_slots = slots <= self.slot_capacity <= MAX_BUFFER_RATIO * max(slots, FIRST_BUFFER_SLOTS)
        return row_capacity, self.slot_capacity if keeps_slots else self._new_slots(slots, max_slots)

    @property
    def _may_pool(self) -> bool:
        """Whether the buffers come from the pool. It keeps them after their return, so it cannot respect a budget."""
        return self._pool is not None and self.num_sides == 1 and self._budget.limit is None

    def _new_rows(self, rows: int) -> int:
        """Return the rows of new buffers for `rows` rows."""
        return padded_rows(rows) if rows and self._may_pool else rows

    def _new_slots(self, required: int, max_slots: Ints | None) -> int:
        """Return the slots of new buffers: at most the expected maximum of the rows, unless they need more.

        If the maximum is small, the buffers have all these slots at once, because growing takes time
        (docs/design/runtime.md#prompts-and-buffers).
        """
        maximum = 0 if max_slots is None else int(max_slots.max(initial=0))
        if required > maximum:
            return buffer_slots(required, self._max_length)
        # A cache with two sides is copied at each step, so that unused slots would cost time.
        if maximum <= MAX_BUFFER_RATIO * max(required, FIRST_BUFFER_SLOTS) and self.num_sides == 1:
            return maximum
        return buffer_slots(min(required + required // GROWTH_DIVISOR, maximum), maximum)

    def _current_array(self, group: _TensorGroup, offset: int = 0) -> Array:
        """Return the side that the next step reads: the array on the host, or a copy from the device.

        offset: 1 for the other side.
        """
        side = (self.side + offset) % len(group.arrays)
        array = group.arrays[side]
        if array is None:
            array = np.stack([value.numpy()[self.buffer_rows] for value in group.values[side]])
        return array

    def _reallocate(
        self, rows: Array, buffer_size: tuple[int, int], used: int, sources: Sequence[Array] | None = None
    ) -> None:
        """Allocate new buffers and copy row rows[i] to row i, in its first `used` slots. `_bind` must follow.

        sources: the arrays to copy from, one for each group; None: the arrays of this cache.
        """
        nbytes = cache_bytes(self._specs, *buffer_size)
        self._budget.acquire(nbytes - self.nbytes)
        self.nbytes = nbytes
        # During the copy both buffers are in memory. So no more caches are copied at a time than runs are allowed.
        with self._session.run_slots or contextlib.nullcontext():
            self._copy_to_new_buffers(rows, buffer_size, used, sources)

    def _copy_to_new_buffers(
        self, rows: Array, buffer_size: tuple[int, int], used: int, sources: Sequence[Array] | None
    ) -> None:
        """Allocate and copy as `_reallocate` says. The bytes have been acquired."""
        earlier: list[Array | None] = [None] * len(self._groups)  # the carries before the latest step
        if sources is None and used:
            sources = [self._current_array(group) for group in self._groups]
            earlier = [self._current_array(g, 1) if g.spec.is_carry else None for g in self._groups]
        write_ids = _zeros(buffer_size if self._on_host else (0, 0), np.dtype(np.int64))
        if used and len(self._write_ids) and self._on_host:
            write_ids[: len(rows), :used] = self._write_ids[rows, :used]
        self.row_capacity, self.slot_capacity, self._write_ids = *buffer_size, write_ids
        for k, group in enumerate(self._groups):
            sizes = [self.slot_capacity if size == SLOT_AXIS else int(size) for size in group.spec.shape[1:]]
            shape = (len(group.members), self.row_capacity, *sizes)
            group.arrays = [_zeros(shape, storage_dtype(group.spec.dtype)) for _ in group.arrays]
            part = group.copied_slots(used)
            if sources and part is not None:
                target, source = self._current_array(group)[part], sources[k][part]
                for i, row in enumerate(rows.tolist()):  # an index array would make a copy of all rows first
                    target[:, i] = source[:, row]
            if (array := earlier[k]) is not None:
                self._current_array(group, 1)[:, : len(rows)] = array[:, rows]

    def _bind(self) -> None:
        """Create the OrtValues of the rows. On another device they replace the arrays."""
        self._return_to_pool()
        self.buffer_rows = np.arange(self.rows)
        if self._pool is not None and self._may_pool and self.slot_capacity:
            arrays = [array for group in self._groups if (array := group.arrays[0]) is not None]
            self.pooled_buffers = self._pool.acquire(self.row_capacity, self.slot_capacity, arrays)
        if self.pooled_buffers is not None:
            for group, values in zip(self._groups, self.pooled_buffers.values, strict=True):
                group.values, group.arrays = [values], [None]
            return
        for group in self._groups:
            for side, array in enumerate(group.arrays):
                if array is not None:
                    group.values[side] = [self._session.device_tensor(tensor[: self.rows]) for tensor in array]
            if not self._on_host:
                group.arrays = [None] * len(group.arrays)

    def _return_to_pool(self) -> None:
        if self.pooled_buffers is not None:
            assert self._pool is not None
            self._pool.release(self.pooled_buffers)
            self.pooled_buffers = None


def move_rows(array: Array, targets: Array, sources: Array, parts: Sequence[tuple[Any, ...]] = ()) -> None:
    """Copy rows `sources` of (rows, …) to rows `targets`, as if all copies happened at once.

    Each target is copied once, after all rows that read it. Of rows that swap in a cycle, one is copied to temporary
    memory.

    parts: the part of each target to copy; by default all of it.
    """
    source_of: dict[int, int] = {}
    part_of: dict[int, tuple[Any, ...]] = {}
    read_rows = set(sources.tolist())
    parts = parts or [()] * len(targets)
    for row, source, part in zip(targets.tolist(), sources.tolist(), parts, strict=True):
        if row in read_rows:
            source_of[row], part_of[row] = source, part
        else:  # frequent, and nothing has to wait for it
            array[(row, *part)] = array[(source, *part)]
    if not source_of:
        return
    readers = Counter(source_of.values())
    ready = [row for row in source_of if not readers[row]]
    saved: dict[int, Array] = {}
    while source_of:
        if not ready:
            row = next(iter(source_of))
            saved[row] = array[row].copy()
            ready.append(row)
        row = ready.pop()
        source, part = source_of.pop(row), part_of[row]
        array[(row, *part)] = saved.get(source, array[source])[part]
        readers[source] -= 1
        if not readers[source] and source in source_of and source not in saved:
            ready.append(source)
