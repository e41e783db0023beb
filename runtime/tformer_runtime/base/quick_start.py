"""The import of this package in less processor time, of which a start has two other uses: packing and hashing."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_VARIABLE = "OPENBLAS_THREAD_TIMEOUT"
WAIT_LOG_CYCLES = "20"  # 2²⁰ cycles are less than a millisecond


@contextmanager
def quick_start() -> Iterator[None]:
    """Import modules without garbage collection, and numpy so that its threads do not take the cores.

    Threads of numpy's OpenBLAS wait by spinning, for 2²⁶ cycles after they start and after each product. They would
    take a core from the opening of a file. So OpenBLAS reads a shorter time when numpy is imported; a time that the
    environment has is kept. The environment and the garbage collection are as before at the end.
    """
    collects = gc.isenabled()
    sets_time = "numpy" not in sys.modules and WAIT_VARIABLE not in os.environ
    gc.disable()
    if sets_time:
        os.environ[WAIT_VARIABLE] = WAIT_LOG_CYCLES
    try:
        yield
    finally:
        if sets_time:
            os.environ.pop(WAIT_VARIABLE, None)
        if collects:
            gc.enable()
