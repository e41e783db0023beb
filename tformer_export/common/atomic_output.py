"""Atomic output: a file is made in a folder next to its place and renamed after verification.

No incomplete file ever has the final name, and a previous file keeps it until the rename.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tformer_export.common.onnx_writer import data_file
from tformer_runtime.base.errors import OutputError
from tformer_runtime.base.special_files import check_output_name
from tformer_runtime.base.whole_files import lock_in_place, lock_without_waiting

if sys.platform != "win32":
    import fcntl

LOCK = "running"  # a file in the folder of an export
_RANDOM_PART = re.compile("[a-z0-9_]{8}")  # of the name of a folder of tempfile


def check_writable(out: Path, force: bool) -> None:
    """Raise OutputError if the file cannot be written, or if it exists and `force` is not set."""
    check_output_name(out)
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


def check_beside(other: Path, out: Path, force: bool) -> None:
    """Raise OutputError if a file that is written with the model `out` cannot be written, or would replace it."""
    if other.resolve() in (out.resolve(), data_file(out).resolve()):
        raise OutputError(f"{other} is the model's own place: give the two files different names")
    check_writable(other, force)


@contextmanager
def folder_next_to(out: Path) -> Iterator[Path]:
    """Make a folder for the unfinished file, on the same disk as its place, and delete it afterwards in any case.

    Its subfolder `done` is for the finished file under its final name. Folders that killed exports of the same file
    left are deleted too: a running export holds a lock on its own. Raises OutputError for an OSError that names a file
    in the folder.
    """
    _sweep(out)
    try:
        folder, lock = _locked_folder(out)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    with folder as name, lock:
        try:
            (Path(name) / "done").mkdir()
            yield Path(name)
        except OSError as error:
            if not (isinstance(error.filename, str) and Path(error.filename).is_relative_to(name)):
                raise
            raise OutputError(f"{out} cannot be written: {error.strerror}") from error


def _locked_folder(out: Path) -> tuple[tempfile.TemporaryDirectory[str], TextIO]:
    """Make a folder with a lock, and take the lock. Another export may sweep the folder before: then make another."""
    while True:
        folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", ignore_cleanup_errors=True)
        place = Path(folder.name) / LOCK
        try:
            lock = place.open("w")
        except FileNotFoundError:
            folder.cleanup()
            continue
        except BaseException:
            folder.cleanup()
            raise
        if lock_in_place(lock, place):
            return folder, lock
        lock.close()
        folder.cleanup()


def _sweep(out: Path) -> None:
    """Delete the folders of killed exports of this file: those whose lock nobody holds, and empty ones."""
    if sys.platform == "win32":
        return
    prefix = f".{out.name}."
    for folder in out.parent.glob(f"{glob.escape(prefix)}*"):
        if _RANDOM_PART.fullmatch(folder.name.removeprefix(prefix)):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        with contextlib.suppress(OSError), (folder / LOCK).open() as file:
            if lock_without_waiting(file):
                shutil.rmtree(folder, ignore_errors=True)


def publish(written: Path, out: Path) -> int:
    """Rename a finished file to its place, and return its size in bytes.

    No file ever stands next to the weights of another: a process that is killed here leaves the old file, the new one
    or none. Raises OutputError if the file cannot be renamed.
    """
    weights = data_file(written)
    is_split = weights.exists()
    size = sum(file.stat().st_size for file in (weights, written) if file.exists())
    try:
        with _publishing(out.parent):
            if is_split:
                out.unlink(missing_ok=True)
                weights.replace(data_file(out))
            written.replace(out)
            if not is_split:
                data_file(out).unlink(missing_ok=True)  # weights of the previous file
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    return size


@contextmanager
def _publishing(folder: Path) -> Iterator[None]:
    """Let one process at a time publish in a folder: two could mix their files and weights."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
