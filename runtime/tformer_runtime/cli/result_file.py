"""A file of results that a run may leave at any moment, even killed, for another to go on with.

Results go to OUT.part. Beside it, OUT.part.json says how many inputs are done, how many bytes their results take, a
digest of these inputs, and what was asked for. It is replaced as a whole, once the results are on the disk, so what it
says holds; what the run had written besides is cut off by the run that goes on. When all is done, OUT.part becomes OUT.

    with ResultFile(path, asked, force=False, resume=True) as out:
        for result in work(out.rest(inputs), out.done):    # inputs that are not done; the number of those that are
            out.add(lines of the result)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tformer_runtime.base.errors import OutputError

if sys.platform != "win32":
    import fcntl

RESULTS, SECONDS = 256, 1.0  # how many, or how long, between two entries of the journal


@dataclass(frozen=True)
class _Place:
    """How far a run has come. inputs: that are done; bytes: of their results; digest: of them, one after the other."""

    inputs: int = 0
    bytes: int = 0
    digest: str = ""

    def after(self, line: str, size: int) -> _Place:
        digest = hashlib.sha256(f"{self.digest} {line}".encode("utf-8", "surrogateescape")).hexdigest()
        return _Place(self.inputs + 1, self.bytes + size, digest)


class ResultFile:
    """Where results are written to. Enter it once; leaving it with an error keeps what is done, and says so in a note.

    Memory: that of the inputs that have been taken and not been answered.
    """

    def __init__(
        self,
        path: Path,
        asked: Mapping[str, Any],
        force: bool = False,
        resume: bool = False,
        keep: bool = True,
        head: Callable[[int], bytes] | None = None,
    ) -> None:
        """path: OUT. asked: what results depend on, by name, as JSON; a run with other values cannot go on.

        force: overwrite what is there. resume: go on with what is there, if anything is. keep: for another to go on.
        head: what stands before the results of so many inputs, of one length for any number.
        OutputError if there is a file that may not be overwritten, or that this run cannot go on with.
        """
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file that results could replace: name another, or none")
        self._path = path
        self._part, self._journal = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json")
        self._asked = json.loads(json.dumps(asked))
        self._force, self._keep, self._head = force, keep, head
        self._first = len(head(0)) if head is not None else 0  # byte of the results
        self._lines: deque[str] = deque()  # that wait for their results
        self._file: BinaryIO | None = None
        self._begun = False
        self._now = self._kept = self._found() if resume else _Place()
        self._due = 0.0
        if resume and not force and path.exists() and not self._part.exists():
            raise OutputError(f"{path} is there and {self._part} is not: nothing is left to resume")
        self._may_end()
        if not (resume or force) and self._part.exists():
            raise OutputError(
                f"{self._part} is there, of a run that did not end: give --resume to go on, or --force to start over"
            )

    @property
    def done(self) -> int:
        """How many inputs are done."""
        return self._now.inputs

    def rest(self, lines: Iterable[str]) -> Iterator[str]:
        """The inputs that are not done, of all inputs. OutputError if those that are done were others."""
        source, skipped = iter(lines), _Place()
        for line in islice(source, self.done):
            skipped = skipped.after(line, 0)
        if skipped.digest != self._now.digest:
            raise OutputError(
                f"the first {self.done} inputs are not those that {self._part} has results of: give the same inputs, "
                "or start over with --force"
            )
        self._begin()
        for line in source:
            self._lines.append(line)
            yield line

    def add(self, results: str | bytes) -> None:
        """The results of the next input."""
        assert self._file is not None
        data = results.encode() if isinstance(results, str) else results
        with self._writing():
            self._file.write(data)
            self._now = self._now.after(self._lines[0], len(data))
            self._lines.popleft()
            if self._now.inputs - self._kept.inputs >= RESULTS or time.monotonic() >= self._due:
                self._record()

    def __enter__(self) -> ResultFile:
        with self._writing():
            self._file = os.fdopen(os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise OutputError(f"another run is writing {self._part}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        except OutputError as failed:
            error = failed
            raise
        finally:
            if error is not None:
                self._leave(error)

    def _finish(self) -> None:
        """Put the results in their place."""
        assert self._file is not None
        with self._writing():
            self._record()
            if self._head is not None:
                self._file.seek(0)
                self._file.write(self._head(self.done))
                self._file.flush()
                os.fsync(self._file.fileno())
        self._may_end()
        with self._writing():
            self._file.close()
            self._part.replace(self._path)
            self._journal.unlink()

    def _leave(self, error: BaseException) -> None:
        """Keep what is done."""
        assert self._file is not None
        with contextlib.suppress(OSError):  # of a disk that is full; what the journal says holds
            if self._begun and not self._file.closed:
                self._record()
        with contextlib.suppress(OSError):
            self._file.close()
        if not (self._kept.inputs and self._keep):
            self._part.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
        elif self._begun:
            error.add_note(f"--resume goes on after input {self._kept.inputs}")

    def _found(self) -> _Place:
        """How far the run had come that left these files; the beginning if there are none."""
        try:
            size, text = self._part.stat().st_size, self._journal.read_text(encoding="utf-8")
        except FileNotFoundError:
            return _Place()
        except OSError as error:
            raise OutputError(f"{self._journal} cannot be read: {error.strerror or error}") from error
        try:
            entry = json.loads(text)
            place, asked = _Place(**entry["place"]), dict(entry["asked"])
        except (ValueError, TypeError, KeyError):
            raise OutputError(f"{self._journal} is not a journal of tformer-run: start over with --force") from None
        for name in {**asked, **self._asked}:
            new, old = self._asked.get(name), asked.get(name)
            if new != old:
                raise OutputError(
                    f"{name} is {_shown(new)}, and was {_shown(old)} for {self._part}: ask for the same, or start over "
                    "with --force"
                )
        if size < self._first + place.bytes and place.inputs:
            raise OutputError(f"{self._part} has lost results since they were written: start over with --force")
        return place

    def _begin(self) -> None:
        """Go to the place, with nothing behind it. The journal comes first: it must not promise what is cut off."""
        assert self._file is not None
        with self._writing():
            self._begun = True
            self._record()
            self._file.truncate(self._first + self._now.bytes)
            self._file.seek(self._first + self._now.bytes)

    def _record(self) -> None:
        """Make the journal say what is done."""
        assert self._file is not None
        now = self._now
        self._file.flush()
        os.fsync(self._file.fileno())
        new = self._journal.with_name(f"{self._journal.name}.new")
        with new.open("w", encoding="utf-8") as file:
            json.dump({"place": asdict(now), "asked": self._asked}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._journal)
        self._kept, self._due = now, time.monotonic() + SECONDS

    def _may_end(self) -> None:
        if self._path.exists() and not self._force:
            raise OutputError(f"{self._path} exists already: give --force to overwrite it")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error.strerror or error}") from error


def _shown(value: Any) -> str:
    return {"null": "not given", "true": "given"}.get(text := json.dumps(value, ensure_ascii=False), text)
