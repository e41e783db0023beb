"""Atomic output: a file is made in a folder next to its place and renamed after verification.

No incomplete file ever has the final name, and a previous file keeps it until the rename.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tformer_export.common.onnx_writer import data_file
from tformer_runtime.base.errors import OutputError

if sys.platform != "win32":
    import fcntl

LOCK = "running"  # a file in the folder of an export
JUST_MADE = 5.0  # seconds


def check_writable(out: Path, force: bool) -> None:
    """Raise OutputError if the file cannot be written, or if it exists and `force` is not set."""
    if out.exists() and not force:
        raise OutputError(f"{out} exists: give --force (force=True) to overwrite it, or another path")
    if data_file(out).exists() and not force:
        raise OutputError(
            f"{data_file(out)} exists, where weights would go: give --force (force=True), or another path"
        )
    if not out.parent.is_dir():
        raise OutputError(f"{out} cannot be written: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK) or out.is_dir():
        raise OutputError(f"{out} cannot be written: {'it is a folder' if out.is_dir() else 'permission denied'}")


@contextmanager
def folder_next_to(out: Path) -> Iterator[Path]:
    """Make a folder for the unfinished file, on the same disk as its place, and delete it afterwards in any case.

    Its subfolder `done` is for the finished file under its final name. Folders that killed exports of the same file
    left are deleted too: a running export holds a lock on its own.
    """
    _sweep(out)
    try:
        folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    with folder as name, (Path(name) / LOCK).open("w") as lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        (Path(name) / "done").mkdir()
        yield Path(name)


def _sweep(out: Path) -> None:
    """Delete the folders of killed exports of this file: those whose lock nobody holds."""
    if sys.platform == "win32":
        return
    for lock in out.parent.glob(f".{glob.escape(out.name)}.*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < JUST_MADE:
                continue  # its export may be about to take the lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def publish(written: Path, out: Path) -> int:
    """Rename a finished file to its place, weights first, and return its size in bytes.

    Raises OutputError if the file cannot be renamed.
    """
    files = [(f, place) for f, place in ((data_file(written), data_file(out)), (written, out)) if f.exists()]
    size = sum(f.stat().st_size for f, _ in files)
    try:
        if len(files) == 1:
            data_file(out).unlink(missing_ok=True)  # weights of the previous file
        for file, place in files:
            file.replace(place)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    return size
