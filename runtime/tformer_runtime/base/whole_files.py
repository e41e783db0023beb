"""Files that appear whole: they are written next to their place, and renamed when they are on the disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from tformer_runtime.base.errors import OutputError

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that takes the place of `path` at the end of the block.

    After an error it is deleted. A killed process leaves the earlier file, and `.NAME.part`, which the next writer uses
    again. Writers of one file take turns, so that none writes into the file of another.
    Raise OutputError for an OSError in the block, or if the file cannot be made or renamed.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        file = _locked(part)
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            with contextlib.suppress(OSError):  # of a full disk, which an earlier call has reported
                file.close()
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


def _locked(part: Path) -> BinaryIO:
    """Open the file, or make it, and lock it. Wait while another writer holds it."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # a link may lead to a file of another
        file = os.fdopen(os.open(part, flags, 0o666), "r+b")
        if lock_in_place(file, part):
            return file
        file.close()


def lock_in_place(file: IO[Any], path: Path) -> bool:
    """Lock an open file, and wait for it. Return whether it is still at its path: another may have taken it away."""
    if sys.platform == "win32":
        return True
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def lock_without_waiting(file: IO[Any]) -> bool:
    """Lock an open file. Return whether nobody else holds it; False on Windows, and on a file system without locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
