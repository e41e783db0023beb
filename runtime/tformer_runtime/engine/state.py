"""The state of decoding: context, caches and lengths of the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.engine.encoder_context import EncoderContext
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.shortlist import Candidates

LogitPositions = Literal["last", "all"]  # which new tokens get logits: the last one of each row, or all


class DecodeCall(Protocol):
    """A run of the decode stage for one shape of tokens, with all inputs and outputs bound.

    `decode_call` implements it for all devices, `cuda_call` for CUDA graphs.

    new_tokens: the new tokens of each row.
    keeps_logits_on_device: whether `run_one_token` leaves the logits on the device.
    survives_moves: whether the call is valid after rows have moved or left, as long as the buffers are the same.
    """

    new_tokens: int
    logit_positions: LogitPositions
    keeps_logits_on_device: bool
    survives_moves: bool

    def ready(self, max_row_length: int) -> bool:
        """Return whether this thread may run the call. max_row_length: cached tokens of the longest row."""

    def run(self, state: State, tokens: Array, counts: Array | None, total_slots: int) -> Array:
        """Run as `Engine.step` does. total_slots: cached tokens of the longest row after the call."""

    def run_one_token(self, state: State, tokens: Array, total_slots: int) -> Array | DeviceLogits:
        """Run as `Engine.step_one_token` does."""


class State:
    """The rows of a batch: their context, their caches, and the number of cached tokens of each.

    lengths: (rows,) int64, the cached tokens of each row. Read-only for callers.
    max_row_length: the maximum of lengths.
    encoded: the requested extra outputs of encode, one row for each request.
    step_extras: names of the extra outputs of each step.
    extras: the extra outputs of the latest step, in the layout of its logits. The next step overwrites them.
    candidates: the candidate ids of each row; None if every row may have any id.
    adapters: (rows,) int64, the number of each row's adapter; None for a file without adapters.
    lengths_before: (rows,) `lengths` before the latest step, while the carries of that time still exist; else None.
    """

    def __init__(
        self,
        context: EncoderContext,
        cache: KVCache,
        rows: int,
        encoded: Mapping[str, Array],
        step_extras: tuple[str, ...],
        candidates: Candidates | None = None,
        adapters: Ints | None = None,
        lengths: Ints | None = None,
    ) -> None:
        self.candidates, self.adapters = candidates, adapters
        self.lengths: Ints = np.zeros(rows, np.int64) if lengths is None else lengths
        self.lengths_before: Ints | None = None
        self.max_row_length = 0
        self.cache = cache
        self.encoder_context = context
        self.calls: dict[tuple[int, LogitPositions], DecodeCall] = {}  # small calls, by their shapes
        self.call: DecodeCall | None = None
        self.encoded = encoded
        self.step_extras = step_extras
        self.extras: dict[str, Array] = {}
        self.released = False

    @property
    def call(self) -> DecodeCall | None:
        """The latest call; None after a change of the buffers that calls are bound to. Setting None drops all calls."""
        return self._call

    @call.setter
    def call(self, call: DecodeCall | None) -> None:
        self._call = call
        if call is None:
            self.calls.clear()

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def row_capacity(self) -> int:
        """The number of rows that the buffers have."""
        return max(self.cache.row_capacity, self.encoder_context.row_capacity)

    @property
    def context(self) -> list[Array]:
        """The outputs of the encode stage, in its order: one row for each row, or for all rows that share it."""
        return self.encoder_context.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the context and the gathered columns."""
        return self.cache.nbytes + self.encoder_context.nbytes + (self.candidates.nbytes if self.candidates else 0)

    def check(self) -> None:
        """Raise UnsupportedCallError if the state has been released."""
        if self.released:
            raise UnsupportedCallError("the state has been released and cannot be continued: read its inputs again")

    def rewind(self, length: int) -> None:
        """Drop the cached tokens of each row beyond the first `length`.

        With carries, rows may lose more: a carry exists for the time after the latest step and before it, and for no
        other. So rows go back to the time before the step, or to no tokens at all. Read `lengths` for the tokens that
        are left.
        """
        kept = np.minimum(self.lengths, length)
        if self.cache.has_carries and (kept < self.lengths).any():
            if self.lengths_before is not None and (self.lengths_before <= kept).all():
                self.cache.swap_sides()
                kept = self.lengths_before
            else:
                self.cache.clear()
                self.call = None
                kept = np.zeros_like(kept)
            self.lengths_before = None
        self.lengths[:] = kept
        self.max_row_length = int(self.lengths.max(initial=0))

    def record_step(self) -> None:
        """Note that a step has written. `lengths` are still those before it, as the carries of the past side are."""
        if self.cache.has_carries:
            self.lengths_before = self.lengths.copy()

    def release(self) -> None:
        """Free the memory; the state cannot be used any more. Garbage collection of the state frees it, too."""
        self.cache.release()
        self.encoder_context.release()
        if self.candidates is not None:
            self.candidates.release()
        self.released = True
