"""The context: outputs of the encode stage that decoding reads and never writes, one row for each sequence.

As in `kv_cache`, the buffers have more rows than are in use, within limits, and only rows that move are copied. If the
file supports it (`DecodeStage.shares_context`), neighbouring rows of one request, such as its beams, share one row of
context, provided that every request has the same number of rows. A free axis has the length of the longest row. It
stays longer after that row has left, until new rows require new buffers. All padding positions of a row have equal
contents, so that repeating the end of a row extends it.

On other devices `reorder` only notes the order, and rows are copied when `values` is read. A captured step has its own
copy, and so needs no moves.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tformer_runtime.backend.cuda_graphs import padded_size
from tformer_runtime.backend.session import Session
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.engine.kv_cache import MAX_BUFFER_RATIO, move_rows
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.format.manifest import BATCH_AXIS, TensorSpec

MAX_AXIS_RATIO = 1.3  # axes longer than this multiple of the need are cut when rows join


class EncoderContext:
    """The context of a batch's rows.

    Its bytes are acquired from `budget`. `release` and garbage collection return them.

    requests: (rows,), the number of the request of each row. Rows with the same number have the same context.
    """

    nbytes = 0

    def __init__(
        self,
        session: Session,
        specs: Sequence[TensorSpec],
        arrays: Sequence[Array],
        lengths: Mapping[str, Ints],
        rows: int,
        budget: MemoryShare,
        shares: bool = False,
        extends: bool = False,
        values: Sequence[Any] = (),
    ) -> None:
        """Store the outputs of the encode stage.

        arrays: the outputs, in the order of specs.
        values: their OrtValues, if they share the memory of the arrays.
        lengths: free axis → (rows,), the length of each row there, with one position of padding if there is any. Other
            free axes are never cut.
        shares: whether rows may share a row of context.
        extends: whether a free axis that is as long as its `lengths` ends with padding in all rows.
        """
        self._session, self._specs, self._budget, self._shares = session, specs, budget, shares
        self._extends = extends
        self._lengths = dict(lengths)
        self.requests = np.arange(rows)
        self._buffer_requests = self.requests  # (rows of the buffers in use,), the request of each
        self._arranged_requests: Ints | None = self.requests  # `requests` for which the buffers are arranged
        self._axes = [spec.shape.index(BATCH_AXIS) if BATCH_AXIS in spec.shape else None for spec in specs]
        # If rows are the first axis, the rows in use are contiguous, so that rows can be added and removed in place.
        self._in_place = session.device == "cpu" and all(axis in (None, 0) for axis in self._axes)
        self._arrays: list[Array] = []
        self._values: list[Any] = []
        self._replace_buffers([_writable(array) for array in arrays])
        if all(map(operator.is_, self._arrays, arrays)):
            self._values = [*values]

    @property
    def rows(self) -> int:
        """The number of rows of the buffers that are in use."""
        return len(self._buffer_requests)

    @property
    def buffers(self) -> list[Array]:
        """The allocated arrays, with room for more rows than there are."""
        return self._arrays

    @property
    def arrays(self) -> list[Array]:
        """The rows of the buffers that are in use."""
        return [_row_range(array, axis, self.rows) for array, axis in zip(self._arrays, self._axes, strict=True)]

    @property
    def values(self) -> list[Any]:
        """The OrtValues to bind. MemoryBudgetError as for `MemoryShare.acquire`; then the context is unchanged."""
        self.share_rows()
        if len(self._values) != len(self._arrays):
            self._values = [self._session.device_tensor(array) for array in self.arrays]
        return self._values

    def share_rows(self) -> None:
        """Let neighbouring rows of one request share a row of context, if the file supports it."""
        self._assign_rows(self.requests)

    def reorder(self, rows: Ints) -> bool:
        """Replace row i by row rows[i]. Return whether there are new values to bind."""
        requests = self.requests[rows]
        if self._session.device != "cpu":
            self.requests = requests
            return bool(self._arrays)
        if np.array_equal(requests, self.requests):  # frequent: beams that take the places of others of their request
            return False
        return self._assign_rows(requests)

    def padded_arrays(self, buffer_rows: Ints, capacity: int) -> list[Array]:
        """Return the context for a captured step. Cost: a copy of all of it.

        Row i of the batch has its context in row buffer_rows[i] of `capacity` rows. Other rows have that of the first.
        Rows share a row of context only if the rows of the step do so as well. Free axes are extended to few different
        sizes, because each takes a graph.
        """
        self.share_rows()
        places = np.zeros(capacity, np.int64)
        places[buffer_rows] = _first_index_of(self._buffer_requests, self.requests)
        sharing = len(self.requests) // max(self.rows, 1)
        if sharing > 1 and capacity % sharing == 0 and (buffer_rows == np.arange(len(buffer_rows))).all():
            places = places[::sharing]
        padded = []
        for spec, array, axis in zip(self._specs, self.arrays, self._axes, strict=True):
            sizes = [
                padded_size(size, size.bit_length() - 3) if self._has_padding(name, size) else size
                for name, size in zip(spec.shape, array.shape, strict=True)
            ]
            padded.append(_take_rows(_resize_axes(array, axis, sizes), axis, places))
        return padded

    def _has_padding(self, axis: int | str, size: int) -> bool:
        """Return whether all rows end with padding on an axis of this size. A row of the maximum length has none."""
        return self._extends and axis in self._lengths and size >= int(self._lengths[str(axis)].max())

    def _assign_rows(self, requests: Ints) -> bool:
        """Arrange the buffers for rows of these requests. Return whether there are new values to bind."""
        if requests is self._arranged_requests:
            return False
        buffer_requests = _shared_requests(requests) if self._shares else requests
        if np.array_equal(buffer_requests, self._buffer_requests) or not self._arrays:
            self.requests, self._buffer_requests = requests, buffer_requests
            self._arranged_requests = requests
            return False
        count, count_before = len(buffer_requests), self.rows
        rows = _first_index_of(self._buffer_requests, buffer_requests)
        if self._in_place and self._arrays and count <= self.row_capacity <= MAX_BUFFER_RATIO * count:
            stays = np.zeros(count, np.bool_)
            common = min(count, count_before)
            stays[:common] = buffer_requests[:common] == self._buffer_requests[:common]
            moved = np.flatnonzero(~stays)
            for array, axis in zip(self._arrays, self._axes, strict=True):
                if axis is not None:
                    move_rows(array, moved, rows[moved])
            changed = count != count_before
            self._values = [] if changed else self._values
        else:
            taken = [_take_rows(array, axis, rows) for array, axis in zip(self._arrays, self._axes, strict=True)]
            self._replace_buffers(taken)
            changed = True
        self._lengths = {name: lengths[rows] for name, lengths in self._lengths.items()}
        self.requests, self._buffer_requests = requests, buffer_requests
        self._arranged_requests = requests
        return changed or not self._in_place

    def join(self, other: EncoderContext) -> None:
        """Append the rows of `other` and release it. Copies its rows, and all rows if the buffers are too small.

        The sharing of rows is arranged when the values are next read, because new rows often split into several first.
        """
        if self._session.device != "cpu":
            self.share_rows()
            other.share_rows()
        rows_before, rows = self.rows, self.rows + other.rows
        self._budget.release(other.nbytes)  # the budget counts the moved rows once
        other.nbytes = 0
        self._lengths = {
            axis: np.concatenate([lengths, other._lengths[axis]]) for axis, lengths in self._lengths.items()
        }
        shapes = [
            self._merged_shape(spec, array.shape, joined.shape, rows)
            for spec, array, joined in zip(self._specs, self._arrays, other._arrays, strict=True)
        ]
        if (
            not self._in_place
            or rows > self.row_capacity
            or any(
                axis is not None and array.shape[1:] != shape[1:]
                for axis, array, shape in zip(self._axes, self._arrays, shapes, strict=True)
            )
        ):
            buffers = [np.empty(shape, array.dtype) for array, shape in zip(self._arrays, shapes, strict=True)]
            for axis, buffer, array in zip(self._axes, buffers, self.arrays, strict=True):
                _row_range(buffer, axis, rows_before)[...] = _resize_axes(array, axis, buffer.shape)
            self._replace_buffers(buffers)
        for axis, buffer, array in zip(self._axes, self._arrays, other.arrays, strict=True):
            if axis is not None:
                _row_range(buffer, axis, rows, rows_before)[...] = _resize_axes(array, axis, buffer.shape)
        self._extends = self._extends and other._extends
        first = int(max(self.requests.max(initial=-1), self._buffer_requests.max(initial=-1))) + 1
        self.requests = np.concatenate([self.requests, other.requests + first])
        self._buffer_requests = np.concatenate([self._buffer_requests, other._buffer_requests + first])
        self._values = []
        other.release()

    def _merged_shape(
        self, spec: TensorSpec, shape: Sequence[int], other_shape: Sequence[int], rows: int
    ) -> tuple[int, ...]:
        """Return the shape of a tensor for `rows` rows of this context and another. Uses the lengths of all rows."""
        merged = []
        for axis, size, other_size in zip(spec.shape, shape, other_shape, strict=True):
            if axis == BATCH_AXIS:
                merged.append(rows)
            else:
                lengths = self._lengths.get(axis) if isinstance(axis, str) else None
                larger = max(size, other_size)
                needed = larger if lengths is None else min(int(lengths.max()), larger)
                merged.append(size if needed <= size <= needed * MAX_AXIS_RATIO else needed)
        return tuple(merged)

    def fit(self) -> bool:
        """Shrink the buffers to the rows in use and their lengths. Return False if they are not larger."""
        if self._session.device != "cpu":
            self.share_rows()
        shapes = [
            self._merged_shape(spec, array.shape, array.shape, self.rows)
            for spec, array in zip(self._specs, self._arrays, strict=True)
        ]
        if all(array.shape == shape for array, shape in zip(self._arrays, shapes, strict=True)):
            return False
        cut = [array[tuple(map(slice, shape))] for array, shape in zip(self._arrays, shapes, strict=True)]
        self._replace_buffers([np.ascontiguousarray(array) for array in cut])
        return True

    def copy(self, rows: Ints, budget: MemoryShare) -> EncoderContext:
        """Return a new context whose row i is a copy of row rows[i]."""
        requests = self.requests[rows]
        buffer_rows = _first_index_of(self._buffer_requests, requests)
        taken = [_take_rows(array, axis, buffer_rows) for array, axis in zip(self._arrays, self._axes, strict=True)]
        lengths = {axis: row_lengths[buffer_rows] for axis, row_lengths in self._lengths.items()}
        other = EncoderContext(
            self._session, self._specs, taken, lengths, len(rows), budget, self._shares, self._extends
        )
        other.requests = other._buffer_requests = requests
        other._arranged_requests = None
        return other

    def release(self) -> None:
        """Free the buffers and their bytes in the budget."""
        self._budget.release(self.nbytes)
        self._arrays, self._values, self.nbytes = [], [], 0

    def __del__(self) -> None:
        if self.nbytes:  # 0 if an interrupt ended the constructor
            self.release()

    @property
    def row_capacity(self) -> int:
        """The number of rows that the buffers have."""
        return max((len(a) for a, axis in zip(self._arrays, self._axes, strict=True) if axis == 0), default=self.rows)

    def _replace_buffers(self, arrays: list[Array]) -> None:
        """Replace the buffers. MemoryBudgetError as for `MemoryShare.acquire`."""
        nbytes = sum(array.nbytes for array in arrays)
        self._budget.acquire(nbytes - self.nbytes)
        self._arrays, self._values, self.nbytes = arrays, [], nbytes


def _shared_requests(requests: Ints) -> Ints:
    """Return one number for each run of equal numbers, if all runs have the same length; else the numbers unchanged."""
    count = len(requests)
    begins = [0, *(np.flatnonzero(requests[1:] != requests[:-1]) + 1).tolist()]
    size, rest = divmod(count, len(begins))
    is_uniform = count > len(begins) and not rest and begins == list(range(0, count, size))
    return requests[begins] if is_uniform else requests


def _first_index_of(array: Ints, values: Ints) -> Ints:
    """Return the first index of each value in the array."""
    order = np.argsort(array, kind="stable")
    return order[np.searchsorted(array[order], values)]


def _row_range(array: Array, axis: int | None, end: int, start: int = 0) -> Array:
    """Return rows start … end - 1 of a tensor with its batch on `axis`; the whole tensor if it has no batch axis."""
    return array if axis is None else array[(slice(None),) * axis + (slice(start, end),)]


def _take_rows(array: Array, axis: int | None, rows: Ints) -> Array:
    """Return a copy of some rows; the tensor itself if it has no batch axis."""
    return array if axis is None else np.ascontiguousarray(np.take(array, rows, axis))


def _resize_axes(array: Array, axis: int | None, shape: Sequence[int]) -> Array:
    """Cut every axis but the batch's to its size in `shape`, or extend it by repeating its end."""
    cut = array[tuple(slice(None) if i == axis else slice(0, size) for i, size in enumerate(shape))]
    sizes = [cut.shape[i] if i == axis else size for i, size in enumerate(shape)]
    if list(cut.shape) == sizes:
        return cut
    resized = np.empty(sizes, array.dtype)  # numpy.pad takes several times as long for small arrays
    filled = [slice(0, size) for size in cut.shape]
    resized[tuple(filled)] = cut
    for i, (size, needed) in enumerate(zip(cut.shape, sizes, strict=True)):
        if size < needed:
            end, rest = filled.copy(), filled.copy()
            end[i], rest[i], filled[i] = slice(size - 1, size), slice(size, needed), slice(0, needed)
            resized[tuple(rest)] = resized[tuple(end)]
    return resized


def _writable(array: Array) -> Array:
    return array if array.flags.carray else array.copy()
