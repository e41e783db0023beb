"""A file for as long as a block of code runs, in the folder for temporary files.

A killed process leaves its file. So each file is locked while it is in use, and the next one that is made deletes those
that nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tformer_runtime.base.whole_files import lock_in_place, lock_without_waiting

PREFIX = "tformer-scratch-"


def is_scratch_file(name: str) -> bool:
    """Return whether a path is one of `scratch_file`."""
    return os.path.basename(name).startswith(PREFIX)


@contextlib.contextmanager
def scratch_file(size: int) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a file of so many zero bytes, readable by its user alone, and its path. It is deleted after the block.

    Raise OSError if it cannot be made, as on a full disk.
    """
    import tempfile  # takes 3 ms to import

    folder = Path(tempfile.gettempdir()).resolve()
    _delete_left_files(folder)
    file, path = _new_file(folder)
    try:
        if not hasattr(os, "posix_fallocate"):  # a full disk would be a crash later, when a page is written
            raise OSError("this system cannot reserve the bytes of a file")
        os.posix_fallocate(file.fileno(), 0, size)
        yield file, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        try:
            threading.Thread(target=file.close, daemon=True).start()  # frees the pages, 0.1 s for a gigabyte
        except RuntimeError:  # no more threads
            file.close()


def _new_file(folder: Path) -> tuple[BinaryIO, Path]:
    """Make a file and lock it. Another process may delete it before it is locked: then make another."""
    import tempfile

    while True:
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        file, path = os.fdopen(descriptor, "r+b", buffering=0), Path(name)
        if lock_in_place(file, path):
            return file, path
        file.close()


def _delete_left_files(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or deleted in the meantime
            flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(path, flags), "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_uid == os.getuid() and lock_without_waiting(file):
                    path.unlink()
