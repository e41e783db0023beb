"""Wall time by phase of an export, and the process's memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PhaseClock:
    """Seconds of each phase, in the order in which the phases ran. A phase that runs twice is summed.

    progress: called with the name of each phase as it begins.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block to the phase `name`."""
        self.progress(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
