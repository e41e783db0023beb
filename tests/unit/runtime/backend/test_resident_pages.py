"""Resident pages of mapped files are dropped, and freed heap memory is returned, measured by /proc."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tformer_runtime.backend import resident_pages
from tformer_runtime.backend.resident_pages import MIN_MAPPED_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def resident(path):
    """Return the resident bytes of the mappings of a file."""
    own, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            own = line.endswith(str(path))
        elif own and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_dropped_pages_of_a_file_are_read_again(tmp_path):
    """Pages of other files and pages written through a private mapping stay."""
    contents = {tmp_path / name: bytes(range(256)) * 4096 for name in ("weights with a space", "other")}
    maps = {}
    for path, content in contents.items():
        with path.open("w+b") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # pages that are not on disk yet cannot be dropped
            maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        assert maps[path][:] == content
    mine, other = contents
    maps[mine][5:9] = b"mine"
    assert resident(mine) >= len(contents[mine])
    resident_pages.drop_file_pages(mine)
    assert resident(mine) < len(contents[mine]) / 2
    assert resident(other) >= len(contents[other])
    assert maps[mine][:] == contents[mine][:5] + b"mine" + contents[mine][9:]


def test_dropping_pages_of_an_unmapped_file_changes_no_mapping(tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert mapping[:] == bytes(1 << 16)
        before = resident(path)
        resident_pages.drop_file_pages(tmp_path / "none")
        assert resident(path) == before > 0


def test_memory_at_the_former_addresses_of_a_file_stays(tmp_path, monkeypatch):
    """Another thread may unmap the file and get memory there after the table of mappings was read."""
    size = 1 << 16
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * size
    start = np.frombuffer(memory, np.uint8).ctypes.data
    path = tmp_path.resolve() / "weights"
    former = f"{start:x}-{start + size:x} r--p 00000000 00:00 1    {path}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: former)
    resident_pages.drop_file_pages(path)
    assert memory[:] == b"x" * size


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_trimming_the_heap_returns_freed_memory():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    size, count = 1 << 15, 2000  # small enough for the heap; the last block keeps the heap from shrinking
    blocks = [library.malloc(size) for _ in range(count + 1)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        library.free(block)
    before = resident_bytes()
    resident_pages.trim_heap()
    assert resident_bytes() < before - size * count / 2
    library.free(blocks[-1])


@pytest.mark.parametrize("nbytes", [0, 400, MIN_MAPPED_BYTES - 4, MIN_MAPPED_BYTES, 5 << 20])
def test_zeros_of_any_size_can_be_written(nbytes):
    array = resident_pages.mapped_zeros((nbytes // 4,), np.dtype(np.float32))
    assert array.nbytes == nbytes
    assert not array.any()
    array[...] = 1
    assert array.sum() == nbytes // 4
    assert array.flags.c_contiguous


def test_pages_of_an_array_are_returned_with_it():
    """So they are in a thread whose heap would keep them: glibc has raised its threshold after the first free()."""
    size, before = 8 << 20, resident_bytes()

    def use():
        for _ in range(3):
            resident_pages.mapped_zeros((4, size // 4), np.dtype(np.uint8))[...] = 1
        views = [resident_pages.mapped_zeros((4, size // 4), np.dtype(np.uint8))[i] for i in range(4)]
        assert not any(view.any() for view in views)

    for _ in range(8):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert resident_bytes() < before + size


@pytest.mark.parametrize("next_bytes", [1 << 20, (1 << 20) - 400, 1 << 19, (1 << 19) - 4, (1 << 20) + 4])
def test_kept_pages_hold_zeros_and_belong_to_one_array(next_bytes):
    resident_pages.trim_heap()
    view = resident_pages.mapped_zeros((2, 1 << 17), np.dtype(np.float32))[1]
    address, view[...] = view.ctypes.data - (1 << 19), 1
    kept = resident_pages.mapped_zeros((1 << 18,), np.dtype(np.float32))  # the view still has the pages
    assert kept.ctypes.data != address
    assert (view == 1).all()
    del view
    array = resident_pages.mapped_zeros((next_bytes // 4,), np.dtype(np.float32))
    assert not array.any()
    assert (array.ctypes.data == address) == (1 << 19 <= next_bytes <= 1 << 20)
    array[...] = 1
    assert not kept.any()


def test_few_freed_pages_are_kept():
    resident_pages.trim_heap()
    before = resident_bytes()
    arrays = [resident_pages.mapped_zeros((1 << 20,), np.dtype(np.uint8)) for _ in range(64)]
    for array in arrays:
        array[...] = 1
    assert resident_bytes() >= before + (64 << 20)
    del array
    arrays.clear()
    assert resident_bytes() < before + (6 << 20)
    resident_pages.trim_heap()
    assert resident_bytes() < before + (2 << 20)


def test_zeros_that_the_system_refuses_are_a_memory_error():
    with pytest.raises(MemoryError):
        resident_pages.mapped_zeros((1 << 60,), np.dtype(np.int8))
    with pytest.raises(MemoryError):
        resident_pages.mapped_zeros((1 << 40, 1 << 40), np.dtype(np.int8))


def resident_bytes():
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
