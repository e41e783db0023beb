"""Give back memory that nobody needs: what a mapped file takes although it can be read again, and what was freed."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_PAGEOUT = 21  # of madvise(2), since Linux 5.4: pages are dropped or swapped out, and nothing is lost
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ \S+ \S+\s+(.*)")


def forget(path: Path) -> None:
    """Drop the resident pages of a file's mappings in this process; what is needed again is read from the file.

    onnxruntime reads weights once to pack them for its kernels and keeps the packed copy: without this, both stay.
    Does nothing where there is no /proc/self/maps.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, UnicodeDecodeError):
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    name = os.fspath(path.resolve())
    for mapping in map(_MAPPING.fullmatch, lines):
        if mapping and mapping[3] == name:
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            advise(start, end - start, _PAGEOUT)


def trim() -> None:
    """Give the system what the C library keeps of memory that was freed. Does nothing where that is not glibc.

    While onnxruntime derives kernels' forms of weights it frees several bytes a weight, most of which glibc kept: a
    file of 134 M weights of 4 bits for latency held 737 MB when it was loaded, and holds 205 so.
    """
    try:
        give_back = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return
    give_back(ctypes.c_size_t(0))
