"""Give back memory that a mapped file takes although it can be read again."""

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
