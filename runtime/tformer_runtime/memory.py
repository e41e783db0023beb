"""How many bytes decoding may hold: caches and contexts ask here before they are made."""

from __future__ import annotations

import threading

from tformer_runtime.errors import MemoryBudgetError


class Budget:
    """Bytes that are held, and at most may be. Safe to share between threads.

    limit: None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._lock = threading.RLock()  # a state that is collected gives back, even in the midst of `take`

    def take(self, count: int) -> None:
        """Hold `count` bytes more; MemoryBudgetError if that passes the limit, and then nothing is taken."""
        with self._lock:
            if self.limit is not None and count > 0 and self.held + count > self.limit:
                raise MemoryBudgetError(
                    f"{count:,} bytes more are needed and {self.limit - self.held:,} of max_memory={self.limit:,} are "
                    "free: allow more, or ask for fewer tokens, beams or requests at once"
                )
            self.held += count
            self.peak = max(self.peak, self.held)

    def give(self, count: int) -> None:
        with self._lock:
            self.held -= count
