"""The files of a loaded model, held open: whether their bytes are still those that were verified.

The weights of a loaded model are mapped. A program that writes into its file, as `cp` does, changes these weights. A
program that cuts the file short ends this process with SIGBUS when it next reads them. A file whose name is given to
another file, as `mv` does, keeps its bytes for those who have it open.

The size and the times of a file show a change at the cost of a system call. A file with a digest is then read again,
because a change of the times alone is harmless: `touch` makes one, and so does `mv` to the file whose name it takes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tformer_runtime.base.errors import ModelChangedError, ModelFileError
from tformer_runtime.base.special_files import endless_reason
from tformer_runtime.format.digest import WEIGHTS_DIGEST_KEY, check_digest, digest_of


class Stamp(NamedTuple):
    """The size and the times of a file, in nanoseconds.

    status_at: of the latest change of its bytes, names, owner or mode. No program can set it.
    """

    size: int
    modified_at: int
    status_at: int


class _OpenFile:
    """An open file. stamp: of the bytes that were loaded. refused: the latest stamp of other bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb", buffering=0)
        self._descriptor = self.file.fileno()
        self.stamp, self.refused = self.read_stamp(), Stamp(-1, -1, -1)

    def read_stamp(self) -> Stamp:
        status = os.fstat(self._descriptor)
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_in_place(self) -> bool:
        """Return whether the name of the file still leads to it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError:
            return False


class OpenFiles:
    """The file of a model and its second file, if it has one. They are closed with the last reference to this object.

    digest: at the end of the file; None if it has none.
    num_bytes: of both files.
    modified_at: the time of the latest change of the file when it was opened, in seconds of Unix.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
        """Open the files.

        metadata: of the file, from `model_file.read_metadata`.
        Raise ModelFileError for a file that cannot be opened. A second file may be missing.
        """
        self._files: list[_OpenFile] = []
        self._lock = threading.Lock()
        self._is_verified = False
        main = Path(path).resolve()  # onnxruntime looks for the second file next to it
        self._weights = metadata.get(WEIGHTS_DIGEST_KEY)
        name = f"{main.name}.data" if self._weights is None else self._weights.partition(" ")[2]
        self._second = main.with_name(name) if name and name == os.path.basename(name) else None
        for each in (main, self._second):
            if each is not None and (each == main or each.exists()):
                self._files.append(_opened(each))
        self.digest = digest_of(self._files[0].file)[0]
        self.num_bytes = sum(file.stamp.size for file in self._files)
        self.modified_at = self._files[0].stamp.modified_at // 10**9

    def __del__(self) -> None:
        for opened in self._files:
            opened.file.close()

    def verify(self) -> str | None:
        """Compare the files with their digest, and return it; None for a file without one.

        Raise ModelFileError for another digest. Cost: as of `check_digest`.
        """
        main, *second = self._files
        if self.digest is not None and self._weights is not None:
            if self._second is None:
                raise ModelFileError(f"{main.path} is damaged: it names no file with weights in its folder")
            if not second:
                raise ModelFileError(f"{self._second} cannot be read: No such file or directory")
        try:
            digest = check_digest(main.file, second[0].file if second else None, self._weights)
        except OSError as error:
            raise ModelFileError(f"{main.path} cannot be read: {error.strerror or error}") from error
        self._is_verified |= digest is not None
        return digest

    def check_loaded(self) -> None:
        """Raise ModelFileError if the files are not those that were opened: what was loaded may be of both."""
        for opened in self._files:
            if opened.read_stamp() != opened.stamp or not opened.is_in_place():
                raise ModelFileError(f"{opened.path} was changed or replaced while it was loaded: load it again")

    def check(self) -> None:
        """Raise ModelChangedError if the bytes of a file have changed. Any thread may call it.

        Cost: some microseconds, and that of `verify` after a change of the times.
        """
        for opened in self._files:
            stamp = opened.read_stamp()
            if stamp != opened.stamp:
                self._check_again(opened, stamp)

    def has_changed(self) -> bool:
        """Return whether the bytes of a file have changed. Cost: as of `check`."""
        try:
            self.check()
        except ModelChangedError:
            return True
        return False

    def is_current(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path leads to the file that is open, whose bytes have not changed."""
        leads_to_it = Path(path).resolve() == self._files[0].path and all(each.is_in_place() for each in self._files)
        return leads_to_it and not self.has_changed()

    def _check_again(self, opened: _OpenFile, stamp: Stamp) -> None:
        with self._lock:
            if stamp == opened.stamp:  # another thread has checked it
                return
            if stamp == opened.refused or not self._has_same_bytes(opened, stamp):
                opened.refused = stamp
                raise ModelChangedError(
                    f"{opened.path} was changed in place after it was loaded: load it again. Replace a file by "
                    "renaming the new one to its name (mv), which models that are loaded do not see",
                    path=os.fspath(opened.path),
                )
            opened.stamp = stamp

    def _has_same_bytes(self, opened: _OpenFile, stamp: Stamp) -> bool:
        if not self._is_verified:
            return stamp[:2] == opened.stamp[:2]
        try:
            return stamp.size == opened.stamp.size and self.verify() == self.digest
        except ModelFileError:
            return False


def _opened(path: Path) -> _OpenFile:
    """Open a file. Raise ModelFileError for a pipe or a device, which may never end."""
    if (reason := endless_reason(path)) is not None:
        raise ModelFileError(reason)
    try:
        return _OpenFile(path)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
