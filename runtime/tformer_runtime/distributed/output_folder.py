"""The folder of the results of a job, which the job can leave at any moment, even killed, and which another continues.

A part of the input becomes one file, which appears whole: a part is finished if its file is there. So a part that two
workers compute is there once. The journal `_tformer.json` has the options of the job, the input files, and their parts.
It is written before the first part, and again at the end.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from tformer_runtime.base.errors import OutputError, quotable
from tformer_runtime.base.whole_files import lock_without_waiting
from tformer_runtime.distributed.row_files import FilePart
from tformer_runtime.distributed.storage import TEMPORARY, Storage, StoredFile

JOURNAL = "_tformer.json"
_LOCK = f"{TEMPORARY}lock"
_PART = re.compile(r"part-\d{5,}-\d{6,}\.(parquet|jsonl|csv)")


class PlannedFile(Struct, frozen=True):
    """An input file and its parts."""

    file: StoredFile
    parts: Sequence[FilePart]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class PlannedPart(Struct, frozen=True):
    """A part of a job. name: of the file of its results. rows_before: rows of the job before its file."""

    name: str
    file: str
    part: FilePart
    rows_before: int


class _Journal(Struct, frozen=True):
    """options: of the job, as JSON values. finished: whether all parts are there."""

    options: dict[str, Any] = field(default_factory=dict)
    files: list[PlannedFile] = field(default_factory=list)
    finished: bool = False


class OutputFolder:
    """The folder of the results of a job."""

    def __init__(self, name: str, ending: str, force: bool = False, resume: bool = False) -> None:
        """
        name: of the folder, which is made if it is not there.
        ending: of the files of results.
        force: delete the results of an earlier job. resume: continue an earlier job.
        """
        self._storage, self._ending = Storage(name), ending
        self._force, self._resume = force, resume
        if self._storage.local and os.path.exists(name) and not os.path.isdir(name):
            raise OutputError(f"{name} is a file: give the name of a folder to --output-file")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other jobs out of a folder of this machine. Raise OutputError if one writes there."""
        self._storage.make_folder()
        if not self._storage.local or sys.platform == "win32":
            yield
            return
        path = Path(self._storage.path) / _LOCK
        try:
            file = path.open("wb")
        except OSError as error:
            raise OutputError(f"{self._storage.name} cannot be written: {error.strerror or error}") from error
        with file:
            if not lock_without_waiting(file):
                raise OutputError(f"another run is writing {self._storage.name}")
            yield
            with suppress(OSError):
                path.unlink()

    def earlier_files(self, options: Mapping[str, Any], files: Sequence[StoredFile]) -> list[PlannedFile] | None:
        """Return the plan of the job that this one continues; None for a new job. For a locked folder.

        options: that results depend on. files: of the input.
        Raise OutputError for a folder with other files, and for a job that cannot be continued.
        """
        self.clean()
        name, journal, names = self._storage.name, self._journal(), self._storage.names()
        visible = [n for n in names if n[0] not in "._"]
        parts = [n for n in visible if _PART.fullmatch(n)]
        if self._force and not (self._resume and journal is not None):
            self._storage.child(JOURNAL).delete()
            for part in parts:
                self._storage.child(part).delete()
            visible, journal = [n for n in visible if n not in parts], None
        if journal is None:
            if visible:
                raise OutputError(f"{name} has other files, such as {visible[0]}: give the name of a new folder")
            return None
        if journal.finished:
            what = "there is nothing to resume" if self._resume else "give --force to overwrite it"
            raise OutputError(f"{name} holds all results of an earlier run: {what}")
        if not self._resume:
            raise OutputError(
                f"{name} holds results of an interrupted run: give --resume to continue, or --force to start over"
            )
        self._must_match(journal, options, files)
        return journal.files

    def clean(self) -> None:
        """Delete files that killed workers have left."""
        for name in self._storage.names():
            if name.startswith(TEMPORARY) and name != _LOCK:
                self._storage.child(name).delete()

    def _must_match(self, journal: _Journal, options: Mapping[str, Any], files: Sequence[StoredFile]) -> None:
        now = json.loads(json.dumps(options))
        for option in {**journal.options, **now}:
            new, old = now.get(option), journal.options.get(option)
            if new != old:
                raise OutputError(
                    f"{quotable(option)} is {_describe(new)}, but was {_describe(old)} in the run that wrote "
                    f"{self._storage.name}: give the same, or start over with --force"
                )
        earlier = {planned.file.name: planned.file for planned in journal.files}
        for name in {**earlier, **{file.name: file for file in files}}:
            found = next((file for file in files if file.name == name), None)
            if found != earlier.get(name):
                change = "is new" if name not in earlier else "is gone" if found is None else "has changed"
                raise OutputError(
                    f"the input {name} {change} since the run that wrote {self._storage.name}: start over with --force"
                )

    def _journal(self) -> _Journal | None:
        content = self._storage.child(JOURNAL).read()
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=_Journal)
        except msgspec.DecodeError:
            raise OutputError(
                f"{self._storage.name}/{JOURNAL} is not a journal of tformer-run, whose place it takes: move it away"
            ) from None

    def record(self, options: Mapping[str, Any], files: Sequence[PlannedFile], finished: bool = False) -> None:
        """Write the journal."""
        entry = _Journal(json.loads(json.dumps(options)), list(files), finished)
        self._storage.child(JOURNAL).write(msgspec.json.encode(entry))

    def parts(self, files: Sequence[PlannedFile]) -> list[PlannedPart]:
        """Return the parts of all files, in the order of their rows."""
        parts, rows = [], 0
        for number, planned in enumerate(files):
            for index, part in enumerate(planned.parts):
                name = f"part-{number:05d}-{index:06d}{self._ending}"
                parts.append(PlannedPart(name, planned.file.name, part, rows))
            rows += planned.rows
        return parts

    def finished(self, parts: Sequence[PlannedPart]) -> set[str]:
        """Return the names of the parts that are finished."""
        return {part.name for part in parts} & set(self._storage.names())

    def must_be_whole(self, parts: Sequence[PlannedPart]) -> None:
        """Raise OutputError if a part is not there that a worker has written."""
        missing = sorted({part.name for part in parts} - self.finished(parts))
        if missing:
            raise OutputError(
                f"{self._storage.name} lacks {missing[0]}, which a worker has written on its machine: give a folder "
                "that all machines share, or one of an object store"
            )


def _describe(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return {"null": "not given", "true": "given"}.get(text, quotable(text))
