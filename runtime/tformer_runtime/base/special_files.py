"""Files that are no files: their reading may wait for ever, or never end."""

from __future__ import annotations

import os
import stat

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
