"""A limit for the number of runs of a session at the same time, and so for the memory of their activations."""

from __future__ import annotations

import os
import weakref
from queue import SimpleQueue


class RunSlots:
    """Slots for runs. `with slots:` waits for a free one, and frees it at the end of the block, after errors too.

    A run must not wait for another run of the same slots. Cost: 0.2 µs if a slot is free.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.free_all()
        _every.add(self)

    def free_all(self) -> None:
        """Make all slots free, for a forked process: its copy has none of the threads that run."""
        self._free: SimpleQueue[None] = SimpleQueue()  # faster than threading.Semaphore, which is written in Python
        for _ in range(self.number):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *error: object) -> None:
        self._free.put(None)


_every: weakref.WeakSet[RunSlots] = weakref.WeakSet()


def _free_every_slot() -> None:
    for slots in _every:
        slots.free_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_every_slot)


def cpu_run_slots() -> RunSlots:
    """Return slots for one run more than this process may use cores.

    More runs compete for the same cores, and each has activations of its own. The additional run has its inputs ready
    when another ends.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return RunSlots(cores + 1)
