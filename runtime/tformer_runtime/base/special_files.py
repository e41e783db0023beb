"""Files that cannot be read or written: pipes and devices, whose reading may never end, and names that are too long."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tformer_runtime.base.errors import OutputError

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095  # of the file systems of Linux, macOS and Windows, and of Linux
UNFINISHED_BYTES = 24  # that the name of an unfinished file has in addition, such as .NAME.4194304.part
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the words for a named pipe, a device or a socket; None for any other path, and for none."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):  # its opening tells why
        return None


def endless_reason(path: str | os.PathLike[str], name: str | None = None) -> str | None:
    """Return why a path is not read, as a sentence, if its reading may never end; None for any other path.

    name: of the path in the sentence.
    """
    if special_kind(path) is None:
        return None
    return f"{name or os.fspath(path)} is not a regular file but a pipe or a device, which may never end"


def check_output_name(path: Path) -> None:
    """Raise OutputError for a file whose name is too long, itself or with the ending that it has until it is whole."""
    name, whole = len(os.fsencode(path.name)), len(os.fsencode(path))
    longest, longest_path = MAX_NAME_BYTES - UNFINISHED_BYTES, MAX_PATH_BYTES - UNFINISHED_BYTES
    if name > longest:
        raise OutputError(
            f"the file name {path.name[:24]}… has {name} bytes: give one of at most {longest}, because an unfinished "
            "file has a longer one"
        )
    if whole > longest_path:
        raise OutputError(f"the path {str(path)[:24]}… has {whole} bytes: give one of at most {longest_path}")
