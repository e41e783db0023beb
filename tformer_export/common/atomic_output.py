"""Where a file goes: it is made in a folder beside its place and renamed when all is proven, so that nothing half-made
ever stands there and what stood there before stays until then."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tformer_export.common.onnx_writer import data_file
from tformer_runtime.base.errors import OutputError


def check_writable(out: Path, force: bool) -> None:
    """OutputError if the file cannot be made, or is there already and may not be overwritten."""
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
def folder_beside(out: Path) -> Iterator[Path]:
    """A folder in which the file is made, on the same disk as its place; gone afterwards, whatever happens.

    In its folder `done` a file can have the name that it will have in its place.
    """
    try:
        folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    with folder as name:
        (Path(name) / "done").mkdir()
        yield Path(name)


def publish(written: Path, out: Path) -> int:
    """Rename a file that is whole to its place, weights first; returns its bytes. OutputError if that cannot be."""
    files = [(f, place) for f, place in ((data_file(written), data_file(out)), (written, out)) if f.exists()]
    size = sum(f.stat().st_size for f, _ in files)
    try:
        if len(files) == 1:
            data_file(out).unlink(missing_ok=True)  # of what stood here before
        for file, place in files:
            file.replace(place)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    return size
