"""Buffers of finished requests, with the call that is bound to them, for later requests of the same size.

To allocate the buffers of a small model and to bind a call to them takes as long as two of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tformer_runtime.base.arrays import Ints
from tformer_runtime.engine.decode_call import SessionCall
from tformer_runtime.engine.kv_cache import KVCache
from tformer_runtime.engine.memory_budget import MemoryShare
from tformer_runtime.engine.state import State

MAX_SPARE_BYTES = 1 << 20  # of caches, context and logits; to allocate larger ones takes little time next to a step
MAX_SPARES = 4


class Spare(Struct, eq=False):
    """The buffers of a state. lengths: (rows,) `State.lengths`, which the call reads."""

    cache: KVCache
    lengths: Ints
    call: SessionCall


class SpareBuffers:
    """The buffers of at most MAX_SPARES released states on the CPU. No budget counts their bytes. Safe to share between
    threads.
    """

    def __init__(self) -> None:
        self._spares: list[Spare] = []
        self._closed = False

    def clear(self) -> None:
        """Free the buffers."""
        self._spares.clear()

    def close(self) -> None:
        """Free the buffers, and keep none any more."""
        self._closed = True
        self.clear()

    def keep(self, state: State) -> None:
        """Keep the buffers of a state, if they may be used again. The state must be released afterwards."""
        call = state.calls.get((1, "last"))
        is_plain = state.candidates is None and state.adapters is None and not state.step_extras
        if not isinstance(call, SessionCall) or not is_plain or not state.cache.may_be_kept:
            return
        nbytes = state.nbytes + call.logits.nbytes
        if nbytes <= MAX_SPARE_BYTES and len(self._spares) < MAX_SPARES and not self._closed:
            if nbytes + call.loop_logits.nbytes > MAX_SPARE_BYTES:
                call.drop_loop()
            self._spares.append(Spare(state.cache.detach(), state.lengths, call))

    def take(self, rows: int, max_tokens: Sequence[int], budget: MemoryShare) -> Spare | None:
        """Return buffers for so many rows and tokens, whose lengths are 0; None if there are none.

        max_tokens: the maximum of tokens of each row. budget: from which the bytes are acquired; with a limit no
        buffers are larger than new ones would be. MemoryBudgetError: see `MemoryShare.acquire`.
        """
        slots, is_limited = max(max_tokens), budget.limit is not None
        for spare in self._spares[::-1]:
            if spare.cache.fits(rows, slots) and not (is_limited and spare.cache.slot_capacity > slots):
                try:
                    self._spares.remove(spare)
                except ValueError:  # another thread has taken it
                    continue
                spare.cache.attach(budget, max_tokens)
                spare.lengths[:] = 0
                return spare
        return None
