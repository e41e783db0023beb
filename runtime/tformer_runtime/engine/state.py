"""What decoding has so far, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np

from tformer_runtime.backend.cuda_graphs import DeviceLogits
from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.engine.encoder_context import Context
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.shortlist import Candidates

Want = Literal["last", "all"]  # of the logits after new tokens: each row's last, or all


class DecodeCall(Protocol):
    """One shape of decode call with everything bound: `decode_call` has it for all devices, `cuda_call` for CUDA
    graphs."""

    new: int
    want: Want
    chooses: bool  # whether `choose` leaves logits on the device

    def ready(self, longest: int) -> bool:
        """Whether this thread may run it, with so many tokens in the longest row."""

    def run(self, state: State, tokens: Array, counts: Array | None, total: int) -> Array:
        """As `Engine.step`. total: what the longest row has afterwards."""

    def choose(self, state: State, tokens: Array, total: int) -> Array | DeviceLogits:
        """As `Engine.choose`."""


class State:
    """What decoding has so far for each row of a batch: its context, its cached tokens, and how many those are.

    lengths: (rows,) int64, the cached tokens of each row; read it, never write it.
    encoded: what encode gave beside the context, as it was asked for, one row for each request.
    extras: what the latest step gave beside its logits, in their layout; overwritten by the next.
    candidates: the ids that may come for each row; None if all may for each.
    """

    def __init__(
        self,
        context: Context,
        cache: KVCache,
        rows: int,
        encoded: Mapping[str, Array],
        wanted: tuple[str, ...],
        candidates: Candidates | None = None,
    ) -> None:
        self.candidates = candidates
        self.lengths: Ints = np.zeros(rows, np.int64)
        self.longest = 0  # the greatest of lengths
        self.cache = cache
        self.held = context
        self.calls: dict[tuple[int, Want], DecodeCall] = {}  # the small ones, by their shapes
        self.call: DecodeCall | None = None
        self.encoded = encoded
        self.wanted = wanted  # of each step
        self.extras: dict[str, Array] = {}
        self.released = False

    @property
    def call(self) -> DecodeCall | None:
        """The latest; None once what calls are bound to has changed."""
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
    def room(self) -> int:
        """Rows that there are buffers for."""
        return max(self.cache.room, self.held.room)

    @property
    def context(self) -> list[Array]:
        """What the encode stage gave for each row, or for all that share it, in the order of its outputs."""
        return self.held.arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the context and gathered columns."""
        return self.cache.nbytes + self.held.nbytes + (self.candidates.nbytes if self.candidates else 0)

    def check(self) -> None:
        """UnsupportedCallError if it has been released."""
        if self.released:
            raise UnsupportedCallError("what was read has been released, and nothing can follow it: read it again")

    def rewind(self, length: int) -> None:
        """Forget what each row has beyond its first `length` tokens."""
        np.minimum(self.lengths, length, out=self.lengths)
        self.longest = int(self.lengths.max(initial=0))

    def release(self) -> None:
        """Give the memory back; the state is of no more use. Done too when nobody refers to it any more."""
        self.cache.release()
        self.held.release()
        if self.candidates is not None:
            self.candidates.release()
        self.released = True
