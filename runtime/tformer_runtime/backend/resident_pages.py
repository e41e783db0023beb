"""Return unneeded memory to the operating system: pages of mapped files, and memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.scratch_files import is_scratch_file

DROP_SECONDS = 0.05  # between two times that pages are dropped: a core packs about 70 MB in it
MIN_MAPPED_BYTES = 1 << 17  # smaller arrays are left to malloc
_HUGE_PAGES_BYTES = 1 << 22  # from here on numpy asks for huge pages as well
_MAX_KEPT_BYTES = 1 << 21  # of a mapping that is kept for another array
_kept_pages: deque[mmap.mmap] = deque(maxlen=4)

# Of madvise(2), since Linux 5.4: drops or swaps out pages without loss of data. DONTNEED would lose them: between the
# reading of the table of mappings and the call, another thread may unmap a file and get memory at the same addresses.
_MADV_PAGEOUT = 21
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ \S+ \S+\s+(.*)")


def mapped_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of zeros whose pages go back to the system with the array, but for a few MB in all.

    glibc has many heaps, and keeps up to 64 MB of freed memory at the end of each, once a program has freed a large
    block: blocks of up to 32 MB then come from the heaps (docs/design/runtime.md). Small arrays, and all arrays on
    systems without private anonymous mappings, are `np.zeros`. Raise MemoryError if the system refuses the memory.

    New pages cost more than the steps of a small model. So the latest mappings of at most _MAX_KEPT_BYTES are kept, and
    cleared for the next arrays of about their size.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(shape, dtype)
    if nbytes > _MAX_KEPT_BYTES:
        return np.ndarray(shape, dtype, _new_pages(nbytes))
    pages = _take_kept_pages(nbytes)
    array: Array = np.ndarray(shape, dtype, np.asarray(_KeptPages(pages or _new_pages(nbytes))))
    if pages is not None:
        array.fill(0)
    return array


class _KeptPages:
    """The memory of an array and its views. The pages are kept for another array when the last of them is freed."""

    __slots__ = ("__array_interface__", "_pages")

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self.__array_interface__ = np.frombuffer(pages, np.uint8).__array_interface__

    def __del__(self, kept: deque[mmap.mmap] = _kept_pages) -> None:
        kept.append(self._pages)  # the oldest are freed


def _take_kept_pages(nbytes: int) -> mmap.mmap | None:
    """Return kept pages for an array; None if there are none of about its size."""
    for pages in list(_kept_pages):
        if nbytes <= len(pages) <= 2 * nbytes:
            with contextlib.suppress(ValueError):  # another thread has taken them
                _kept_pages.remove(pages)
                return pages
    return None


def _new_pages(nbytes: int) -> mmap.mmap:
    """Return a private mapping. Raise MemoryError if the system refuses it."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    if nbytes >= _HUGE_PAGES_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


@contextlib.contextmanager
def few_file_pages(path: Path) -> Iterator[None]:
    """Keep few pages of a model file and of scratch files resident while the block opens the file.

    onnxruntime lets the stored weights go as it packs them, but those that a branch of an `If` reads only at the end.
    """
    done = threading.Event()

    def drop_again() -> None:
        while not done.wait(DROP_SECONDS):
            drop_file_pages(path)

    thread = threading.Thread(target=drop_again, name="tformer-pages", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        drop_file_pages(path)


def drop_file_pages(path: Path) -> None:
    """Drop the resident pages of a model file, its second file and scratch files from this process.

    Later reads load them from the files again. onnxruntime reads weights once to pack them for its kernels and keeps
    the packed copy. Without this function, both copies stay in memory. Does nothing on systems without /proc/self/maps.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, UnicodeDecodeError):
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    resolved = path.resolve()
    names = {os.fspath(resolved), f"{resolved}.data"}
    for mapping in map(_MAPPING.fullmatch, lines):
        if mapping and (mapping[3] in names or is_scratch_file(mapping[3])):
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            advise(start, end - start, _MADV_PAGEOUT)


def trim_heap() -> None:
    """Return freed memory that the C library keeps to the system. Does nothing with C libraries other than glibc.

    While onnxruntime packs weights for its kernels, it frees several bytes for each weight. glibc keeps most of
    these bytes (docs/design/runtime.md). The pages that `mapped_zeros` keeps are returned, too.
    """
    _kept_pages.clear()
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return
    malloc_trim(ctypes.c_size_t(0))
