"""The files of a loaded model, held open: whether their bytes are still those that were verified.

The weights of a loaded model are mapped. A program that writes into its file, as `cp` does, changes these weights. A
program that cuts the file short ends this process with SIGBUS when it next reads them. A file whose name is given to
another file, as `mv` does, keeps its bytes for those who have it open.

The weights of a small file are mapped from a copy without a name, which no program can change. A larger file is
watched: its size and times show a change at the cost of a system call. A file with a digest is then read again, because
a change of the times alone is harmless: `touch` makes one, and so does `mv` to the file whose name it takes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tformer_runtime.base.errors import ModelChangedError, ModelFileError
from tformer_runtime.base.scratch_files import scratch_file
from tformer_runtime.base.special_files import MAX_NAME_BYTES
from tformer_runtime.format.digest import HASHING_THREADS, WEIGHTS_DIGEST_KEY, check_digest, copy_bytes, digest_of
from tformer_runtime.format.manifest import MANIFEST_KEY
from tformer_runtime.format.model_file import read_metadata, reading

MAX_COPIED_BYTES = 32 << 20  # copying takes 0.3 ms for a megabyte


class Stamp(NamedTuple):
    """The size and the times of a file, in nanoseconds. `_OpenFile.is_in_place` sees a new file of the same name.

    size: sees a file that is cut short or extended.
    modified_at: sees new bytes of the same size, unless a program sets the time back, as `cp -p` and `touch -d` do.
    status_at: sees new bytes whose time was set back, because no program can set it. But it also changes with the mode,
        the owner and the number of names (`chmod`, `ln`, `mv`), so the bytes must then be compared.
    """

    size: int
    modified_at: int
    status_at: int


class _OpenFile:
    """An open file. stamp: of the bytes that were loaded. refused: the latest stamp of other bytes."""

    def __init__(self, path: Path) -> None:
        """path: may be a link to the file."""
        self._name, self.path = path.absolute(), path.resolve()
        self.file = self.path.open("rb", buffering=0)
        self._descriptor = self.file.fileno()
        self.stamp, self.refused = self.read_stamp(), Stamp(-1, -1, -1)

    def __del__(self) -> None:
        if hasattr(self, "file"):  # it was opened
            self.file.close()

    def read_stamp(self) -> Stamp:
        status = os.fstat(self._descriptor)
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_in_place(self) -> bool:
        """Return whether the path that was opened still leads to the file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._name.stat())
        except OSError:
            return False


def _is_name(text: str) -> bool:
    """Return whether a text may be the name of a file, in the folder of another."""
    is_plain = text == os.path.basename(text) and text not in ("", ".", "..") and "\0" not in text
    return is_plain and len(os.fsencode(text)) <= MAX_NAME_BYTES


class OpenFiles:
    """The file of a model and its second file, if it has one, until `close`.

    metadata: of the file.
    digest: at the end of the file; None if it has none.
    is_copied: whether the weights are mapped from a copy.
    num_bytes: of both files.
    modified_at: the time of the latest change of the file when it was opened, in seconds of Unix.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the files. Raise ModelFileError for one that cannot be read. The second file may be missing."""
        self._files: list[_OpenFile] = []
        self._lock = threading.Lock()
        self.is_copied = False
        with reading(path):
            main = _OpenFile(Path(path))
        self._files.append(main)
        self.metadata = read_metadata(path)
        self._weights = self.metadata.get(WEIGHTS_DIGEST_KEY)
        # onnxruntime looks for the second file next to the file itself, not next to a link to it.
        name = f"{main.path.name}.data" if self._weights is None else self._weights.partition(" ")[2]
        self._second = main.path.with_name(name) if _is_name(name) else None
        if self._second is not None and self._second.exists():
            with reading(self._second):
                self._files.append(_OpenFile(self._second))
        with reading(path):
            self.digest = digest_of(main.file)[0]
        self.num_bytes = sum(file.stamp.size for file in self._files)
        self.modified_at = main.stamp.modified_at // 10**9

    def close(self) -> None:
        """Close the files, each when no other thread checks it. Later checks find no change."""
        self._files = []

    def verify(self, threads: int = HASHING_THREADS) -> str | None:
        """Compare the files with their digest, and return it; None for a file without one.

        threads: those that hash the files.
        Raise ModelFileError for another digest. Cost: see `check_digest`.
        """
        files = self._files
        if not files:  # another thread has closed them
            return self.digest
        main, *second = files
        if self.digest is not None and self._weights is not None:
            if self._second is None:
                raise ModelFileError(f"{main.path} is damaged: it names no file with weights in its folder")
            if not second:
                raise ModelFileError(f"{self._second} cannot be read: No such file or directory")
        try:
            digest = check_digest(main.file, second[0].file if second else None, self._weights, threads)
        except OSError as error:
            raise ModelFileError(f"{main.path} cannot be read: {error.strerror or error}") from error
        return digest

    @contextlib.contextmanager
    def mapped_path(self) -> Iterator[Path]:
        """Yield the path of the file whose weights are to be mapped in the block: of a copy if the file is small.

        The copy is deleted at the end of the block, and its bytes last until they are no longer mapped. If there is no
        place for it, or if the file has no digest, the file itself is mapped.
        """
        main, *second = self._files
        self.is_copied = False
        with contextlib.ExitStack() as stack:
            path = main.path
            # The exporter names the second file next to the digest. Another tool may have put weights into any file.
            is_whole = self.digest is not None and self._weights is None and not second
            if is_whole and main.stamp.size <= MAX_COPIED_BYTES:
                with contextlib.suppress(OSError):
                    file, copy = stack.enter_context(scratch_file(main.stamp.size))
                    copy_bytes(main.file, file, main.stamp.size)
                    path, self.is_copied = copy, True
            yield path

    def end_loading(self) -> None:
        """Raise ModelFileError if the files are not those that were opened: the loaded parts may be of both.

        A change of the mode or of the number of names is harmless. Another size or time of modification is not, even if
        the digest fits at the end: parts may have been loaded from other bytes in between.
        The manifest, which may have large tokenizers, leaves the metadata.
        """
        self.metadata.pop(MANIFEST_KEY, None)
        for opened in self._files:
            stamp = opened.read_stamp()
            is_same = stamp == opened.stamp or (stamp[:2] == opened.stamp[:2] and self._has_same_bytes(opened, stamp))
            if not is_same or not opened.is_in_place():
                raise ModelFileError(f"{opened.path} was changed or replaced while it was loaded: load it again")
            opened.stamp = stamp

    def check(self) -> None:
        """Raise ModelChangedError if the mapped bytes of a file have changed. Any thread may call it.

        Cost: some microseconds for a file that is not copied, and that of `verify` after a change of the times.
        """
        if not self.is_copied:
            self._check_files()

    def _check_files(self) -> None:
        for opened in self._files:
            stamp = opened.read_stamp()
            if stamp != opened.stamp:
                self._check_again(opened, stamp)

    def has_changed(self) -> bool:
        """Return whether the mapped bytes of a file have changed. Cost: see `check`."""
        return not self.is_copied and not self._are_same()

    def _are_same(self) -> bool:
        try:
            self._check_files()
        except ModelChangedError:
            return False
        return True

    def are_current(self) -> bool:
        """Return whether the paths that were opened lead to these files, whose bytes have not changed."""
        return all(opened.is_in_place() for opened in self._files) and self._are_same()

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
        """Compare the digest; in a file without one, the size and the time of modification."""
        if self.digest is None:
            return stamp[:2] == opened.stamp[:2]
        try:
            return stamp.size == opened.stamp.size and self.verify() == self.digest
        except ModelFileError:
            return False
