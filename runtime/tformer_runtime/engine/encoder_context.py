"""What the encode stage leaves for the decode stage: tensors that decoding reads and never writes, one row a sequence.

As the caches have it (`kv_cache.py`), the buffers have room for more rows than are in use, though not for far more, and
only rows that move are copied. Where the file can share it (`Decode.shares_context`), neighbouring rows that came of
one request, such as its beams, have one row of context together, as long as every request has as many rows. A free axis
is as long as the longest row's, and longer after that has left, until rows come for which the buffers are made anew.
What stands at a row's position of padding is what stands at any, so that a row can be made as long as another by
repeating its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.engine.kv_cache import SPARE, move
from tformer_runtime.engine.memory_budget import Share
from tformer_runtime.format.manifest import BATCH, TensorSpec

_WASTE = 1.3  # times the length that is needed: longer axes are cut when rows come


class Context:
    """The context of a batch's rows. Its bytes are taken from `budget`, and given back by `release`, or when nobody
    refers to it any more.

    arrays: as the encode stage gave them, in the order of specs. lengths: free axis → (rows,) how long each row's own
    part is, a position of padding counted if there is one; axes that it does not tell are never cut. shares: whether
    the file can share them.
    """

    nbytes = 0

    def __init__(
        self,
        session: Session,
        specs: Sequence[TensorSpec],
        arrays: Sequence[Array],
        lengths: Mapping[str, Ints],
        rows: int,
        budget: Share,
        shares: bool = False,
    ) -> None:
        self._session, self._specs, self._budget, self._shares = session, specs, budget, shares
        self._lengths = dict(lengths)
        self.requests = np.arange(rows)  # of each row of the batch: rows with the same number have the same context
        self._held = self.requests  # of each row of the buffers
        self._axes = [spec.shape.index(BATCH) if BATCH in spec.shape else None for spec in specs]
        # Rows can come and go in place where they are the first axis: the rows in use are then one piece of memory.
        self._in_place = session.device == "cpu" and all(axis in (None, 0) for axis in self._axes)
        self._arrays: list[Array] = []
        self._values: list[Any] = []
        self._hold([_writable(array) for array in arrays])

    @property
    def rows(self) -> int:
        """Of the buffers, in use."""
        return len(self._held)

    @property
    def arrays(self) -> list[Array]:
        """The rows that are in use."""
        return [_rows(array, axis, self.rows) for array, axis in zip(self._arrays, self._axes, strict=True)]

    @property
    def values(self) -> list[Any]:
        """The OrtValues to bind. MemoryBudgetError as of `Share.take`, and nothing has changed."""
        self.arrange()
        if len(self._values) != len(self._arrays):
            self._values = [self._session.tensor(array) for array in self.arrays]
        return self._values

    def arrange(self) -> None:
        """Have neighbouring rows of one request share its context, where the file can."""
        self._arrange(self.requests)

    def reorder(self, rows: Ints) -> bool:
        """Row i becomes what row rows[i] was. True if there are new values to bind."""
        return self._arrange(self.requests[rows])

    def _arrange(self, requests: Ints) -> bool:
        """Have the buffers hold what rows of these requests read; True if there are new values to bind."""
        wanted = _together(requests) if self._shares else requests
        if np.array_equal(wanted, self._held) or not self._arrays:
            self.requests, self._held = requests, wanted
            return False
        count, before = len(wanted), self.rows
        rows = _first_of(self._held, wanted)
        if self._in_place and self._arrays and count <= self.room <= SPARE * count:
            stays = np.zeros(count, np.bool_)
            both = min(count, before)
            stays[:both] = wanted[:both] == self._held[:both]
            moved = np.flatnonzero(~stays)
            for array, axis in zip(self._arrays, self._axes, strict=True):
                if axis is not None:
                    move(array, moved, rows[moved])
            changed = count != before
            self._values = [] if changed else self._values
        else:
            self._hold([_taken(array, axis, rows) for array, axis in zip(self._arrays, self._axes, strict=True)])
            changed = True
        self._lengths = {name: own[rows] for name, own in self._lengths.items()}
        self.requests, self._held = requests, wanted
        return changed or not self._in_place

    def join(self, other: Context) -> None:
        """Append the other's rows; the other is released. Copies those, and all of them where there is no room.

        What rows share is arranged when it is next read, as rows that come often continue as several.
        """
        before, rows = self.rows, self.rows + other.rows
        self._budget.give(other.nbytes)  # what moves over is counted once
        other.nbytes = 0
        self._lengths = {name: np.concatenate([own, other._lengths[name]]) for name, own in self._lengths.items()}
        shapes = [self._shape(*each, rows) for each in zip(self._specs, self._arrays, other._arrays, strict=True)]
        if (
            not self._in_place
            or rows > self.room
            or any(
                axis is not None and array.shape[1:] != shape[1:]
                for axis, array, shape in zip(self._axes, self._arrays, shapes, strict=True)
            )
        ):
            grown = [np.empty(shape, array.dtype) for array, shape in zip(self._arrays, shapes, strict=True)]
            for axis, array, kept in zip(self._axes, grown, self.arrays, strict=True):
                _rows(array, axis, before)[...] = _fitted(kept, axis, array.shape)
            self._hold(grown)
        for axis, array, came in zip(self._axes, self._arrays, other.arrays, strict=True):
            if axis is not None:
                _rows(array, axis, rows, before)[...] = _fitted(came, axis, array.shape)
        first = int(max(self.requests.max(initial=-1), self._held.max(initial=-1))) + 1
        self.requests = np.concatenate([self.requests, other.requests + first])
        self._held, self._values = np.concatenate([self._held, other._held + first]), []
        other.release()

    def _shape(self, spec: TensorSpec, held: Array, came: Array, rows: int) -> tuple[int, ...]:
        """What a tensor's shape is to be for all rows."""
        shape = []
        for name, one, two in zip(spec.shape, held.shape, came.shape, strict=True):
            if name == BATCH:
                shape.append(rows)
            else:
                own = self._lengths.get(name) if isinstance(name, str) else None
                need = max(one, two) if own is None else min(int(own.max()), max(one, two))
                shape.append(one if need <= one <= need * _WASTE else need)
        return tuple(shape)

    def fit(self) -> bool:
        """Give back the room beyond the rows, and far beyond the longest. False if that is nothing to speak of."""
        shapes = [
            self._shape(spec, array, array, self.rows) for spec, array in zip(self._specs, self._arrays, strict=True)
        ]
        if all(array.shape == shape for array, shape in zip(self._arrays, shapes, strict=True)):
            return False
        cut = [array[tuple(map(slice, shape))] for array, shape in zip(self._arrays, shapes, strict=True)]
        self._hold([np.ascontiguousarray(array) for array in cut])
        return True

    def copy(self, rows: Ints, budget: Share) -> Context:
        """A context of its own, whose row i is what row rows[i] is here."""
        wanted = self.requests[rows]
        own = _first_of(self._held, wanted)
        taken = [_taken(array, axis, own) for array, axis in zip(self._arrays, self._axes, strict=True)]
        lengths = {name: length[own] for name, length in self._lengths.items()}
        other = Context(self._session, self._specs, taken, lengths, len(rows), budget, self._shares)
        other.requests = other._held = wanted
        return other

    def release(self) -> None:
        """Give the memory back."""
        self._budget.give(self.nbytes)
        self._arrays, self._values, self.nbytes = [], [], 0

    def __del__(self) -> None:
        if self.nbytes:  # not when an interrupt came before there was anything to give back
            self.release()

    @property
    def room(self) -> int:
        """Rows that the buffers have."""
        return max((len(a) for a, axis in zip(self._arrays, self._axes, strict=True) if axis == 0), default=self.rows)

    def _hold(self, arrays: list[Array]) -> None:
        """Take other buffers in the place of the present ones. MemoryBudgetError as of `Share.take`."""
        count = sum(array.nbytes for array in arrays)
        self._budget.take(count - self.nbytes)
        self._arrays, self._values, self.nbytes = arrays, [], count


def _together(requests: Ints) -> Ints:
    """One number for each run of equal ones, if all runs are as long; else the numbers themselves."""
    begins = np.flatnonzero(np.diff(requests, prepend=-1))
    alike = len(begins) < len(requests) and len(set(np.diff(begins, append=len(requests)).tolist())) == 1
    return requests[begins] if alike else requests


def _first_of(held: Ints, wanted: Ints) -> Ints:
    """Where each of the wanted numbers is held first."""
    order = np.argsort(held, kind="stable")
    return order[np.searchsorted(held[order], wanted)]


def _rows(array: Array, axis: int | None, end: int, start: int = 0) -> Array:
    """Some rows of a tensor whose batch is on `axis`; all of one that has none."""
    return array if axis is None else array[(slice(None),) * axis + (slice(start, end),)]


def _taken(array: Array, axis: int | None, rows: Ints) -> Array:
    return array if axis is None else np.ascontiguousarray(np.take(array, rows, axis))


def _fitted(array: Array, axis: int | None, shape: Sequence[int]) -> Array:
    """Every axis but the batch's as long as in `shape`: cut, or its end repeated."""
    cut = array[tuple(slice(None) if at == axis else slice(0, size) for at, size in enumerate(shape))]
    more = [(0, 0 if at == axis else size - cut.shape[at]) for at, size in enumerate(shape)]
    return np.pad(cut, more, mode="edge") if any(end for _, end in more) else cut


def _writable(array: Array) -> Array:
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()
