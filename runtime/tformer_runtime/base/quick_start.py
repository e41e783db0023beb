"""Import this package in less processor time, because packing and hashing also use the processor at a start."""

from __future__ import annotations

import atexit
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

    Nearly all objects that an import makes live as long as the process. So at the end they become old objects, and the
    next two collections do not visit them. That is left out if the process has frozen objects, which would become
    subject to collection again.
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
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection, and at the end of the process the later ones too.

    It is for a command, after its imports: their objects stay alive until the process ends, and then the system frees
    all memory. A collection takes 20 ms with numpy and onnxruntime, and half a second with torch.
    """
    gc.freeze()
    atexit.register(gc.freeze)
