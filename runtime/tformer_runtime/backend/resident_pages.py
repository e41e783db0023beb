"""Return unneeded memory to the operating system: pages of mapped files, and memory that was freed."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_MADV_PAGEOUT = 21  # of madvise(2), since Linux 5.4: drops or swaps out pages without loss of data
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ \S+ \S+\s+(.*)")


def drop_file_pages(path: Path) -> None:
    """Drop the resident pages of a file's mappings in this process. Later reads load them from the file again.

    onnxruntime reads weights once to pack them for its kernels and keeps the packed copy. Without this function, both
    copies stay in memory. Does nothing on systems without /proc/self/maps.
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
            advise(start, end - start, _MADV_PAGEOUT)


def trim_heap() -> None:
    """Return freed memory that the C library keeps to the system. Does nothing with C libraries other than glibc.

    While onnxruntime packs weights for its kernels, it frees several bytes for each weight, most of which glibc keeps
    (docs/design/kernels.md).
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return
    malloc_trim(ctypes.c_size_t(0))
