"""Files of this machine and of object stores, by one name each: a path, or a URI such as s3://bucket/name.

pyarrow has the file systems. A file is written whole: on this machine it is renamed to its place, and an object of a
store appears when its upload is complete.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from msgspec import Struct

from tformer_runtime.base.errors import InputError, OptionError, OutputError
from tformer_runtime.base.extras import import_optional

TEMPORARY = ".tformer-"  # the beginning of names of files that are not whole; readers skip names with a dot
_WILDCARD = re.compile(r"[*?\[]")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class StoredFile(Struct, frozen=True):
    """A file of rows. modified: the time of its last change, in nanoseconds."""

    name: str
    size: int
    modified: int


class Storage:
    """The file system of a name. local: whether it is that of this machine.

    path: of the name in the file system. full_name: a name that does not depend on the current folder.
    """

    def __init__(self, name: str) -> None:
        """Raise OptionError for a name of a file system that pyarrow does not have, or cannot reach."""
        fs = import_optional("pyarrow.fs", "files of many rows need pyarrow", "ray")
        self._fs_module = fs
        name = url2pathname(urlsplit(name).path) if name.startswith("file://") else name
        self.name, self.local = name, not _URI.match(name)
        try:
            if self.local:
                self.path = self.full_name = str(Path(name).absolute())
                self._fs: Any = fs.LocalFileSystem()
            else:
                self._scheme, self.full_name = name.partition("://")[0], name
                self._fs, self.path = fs.FileSystem.from_uri(name)
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
            raise OptionError(f"{name} is not a file that can be reached: {_reason(error)}") from error

    def files(self, recursive: bool = False) -> list[StoredFile]:
        """Return the files that the name, a pattern or a folder, stands for, in the order of their names.

        Files of a folder whose names begin with a dot or an underscore are left out, as all readers of folders do.
        Raise InputError if there is none.
        """
        kind = self._fs_module.FileType
        try:
            if _WILDCARD.search(self.path):
                found = [info for info in self._list(_base_of(self.path), True) if _matches(info.path, self.path)]
            else:
                (info,) = self._fs.get_file_info([self.path])
                if info.type == kind.Directory:
                    found = [info for info in self._list(self.path, recursive) if info.base_name[0] not in "._"]
                else:
                    found = [info]
            files = [info for info in found if info.type == kind.File]
        except (OSError, ValueError) as error:
            raise InputError(f"{self.name} cannot be read: {_reason(error)}") from error
        if not files:
            raise InputError(f"{self.name}: there is no such file")
        return [StoredFile(self._name_of(i.path), i.size, i.mtime_ns or 0) for i in sorted(files, key=lambda i: i.path)]

    def _list(self, folder: str, recursive: bool) -> list[Any]:
        listed: list[Any] = self._fs.get_file_info(
            self._fs_module.FileSelector(folder, recursive=recursive, allow_not_found=True)
        )
        return listed

    def _name_of(self, path: str) -> str:
        if self.local:
            return path
        query = self.name.partition("?")[2]
        return f"{self._scheme}://{path}{'?' + query if query else ''}"

    def child(self, name: str) -> Storage:
        """Return a file of this folder."""
        base, mark, query = self.name.partition("?") if not self.local else (self.name, "", "")
        return Storage(f"{base.rstrip('/')}/{name}{mark}{query}")

    def names(self) -> dict[str, int]:
        """Return name → size of the files of this folder; none if there is no folder."""
        try:
            listed = self._list(self.path, False)
        except (OSError, ValueError) as error:
            raise OutputError(f"{self.name} cannot be read: {_reason(error)}") from error
        return {info.base_name: info.size for info in listed if info.type == self._fs_module.FileType.File}

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Open a file for reading at any place. Raise InputError for an OSError in the block."""
        try:
            with self._fs.open_input_file(self.path) as file:
                yield file
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {_reason(error)}") from error

    def read(self) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        try:
            with self._fs.open_input_file(self.path) as file:
                content: bytes = file.readall()
                return content
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{self.name} cannot be read: {_reason(error)}") from error

    def write(self, content: bytes) -> None:
        """Write a file whole. Raise OutputError if that fails; then the file is as it was."""
        try:
            if self.local:
                _write_local(Path(self.path), content)
            else:
                with self._fs.open_output_stream(self.path) as stream:
                    stream.write(content)
        except OSError as error:
            raise OutputError(f"{self.name} cannot be written: {_reason(error)}") from error

    def make_folder(self) -> None:
        """Make a folder, if it is not there. Raise OutputError if that fails."""
        try:
            self._fs.create_dir(self.path, recursive=True)
        except (OSError, ValueError) as error:
            raise OutputError(f"{self.name} cannot be made: {_reason(error)}") from error

    def delete(self) -> None:
        """Delete a file, if it is there. Raise OutputError if that fails."""
        try:
            self._fs.delete_file(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise OutputError(f"{self.name} cannot be deleted: {_reason(error)}") from error


def _write_local(path: Path, content: bytes) -> None:
    """Write a file under another name, and rename it. Several writers do not disturb each other."""
    part = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _base_of(pattern: str) -> str:
    """Return the folder before the first part of a path with a wildcard."""
    parts = PurePosixPath(pattern).parts
    first = next(i for i, part in enumerate(parts) if _WILDCARD.search(part))
    return str(PurePosixPath(*parts[:first])) if first else "."


def _matches(path: str, pattern: str) -> bool:
    name, of = PurePosixPath(path), PurePosixPath(pattern)
    return len(name.parts) == len(of.parts) and name.match(str(of))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
