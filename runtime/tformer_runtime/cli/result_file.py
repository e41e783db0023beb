"""An output file that a run can leave at any moment, even killed, and that a later run can resume.

Results go to OUT.part. The journal OUT.part.json holds the number of finished inputs, the bytes of their results, a
digest of these inputs and the options of the run. The journal is replaced atomically, after the results are on the
disk, so it is always true. A run that resumes cuts off results that are not in the journal. At the end of the run
OUT.part becomes OUT.

    with ResultFile(path, options, force=False, resume=True) as out:
        remaining = out.rest(inputs)                       # without the out.done finished inputs
        for result in work(remaining, out.done):
            out.add(lines of the result)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from msgspec import Struct
from msgspec.structs import asdict

from tformer_runtime.base.errors import OutputError, quotable
from tformer_runtime.base.special_files import check_output_name
from tformer_runtime.base.whole_files import lock_without_waiting

JOURNAL_INTERVAL_RESULTS = 256  # unrecorded results after which the journal is written
JOURNAL_INTERVAL_SECONDS = 1.0  # or after this time


class _RunProgress(Struct, frozen=True):
    """The progress of a run.

    inputs: the number of finished inputs.
    bytes: of their results.
    digest: of the finished inputs, one after the other.
    """

    inputs: int = 0
    bytes: int = 0
    digest: str = ""

    @classmethod
    def of(cls, entry: Any) -> _RunProgress:
        """Return the progress of a journal's entry. Raise ValueError for any other value."""
        counts = [entry.get(name) for name in ("inputs", "bytes")] if isinstance(entry, dict) else []
        if not counts or set(entry) != {"inputs", "bytes", "digest"} or not isinstance(entry["digest"], str):
            raise ValueError
        if any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
            raise ValueError
        return cls(**entry)

    def after(self, line: str, size: int) -> _RunProgress:
        import hashlib  # takes 3 ms to import, and a run without a result file does not need it

        digest = hashlib.sha256(f"{self.digest} {line}".encode("utf-8", "surrogateescape")).hexdigest()
        return _RunProgress(self.inputs + 1, self.bytes + size, digest)


class ResultFile:
    """The file of a run's results. A context manager, for one use.

    Leaving it with an error keeps the finished results, and adds a note to the error.
    Memory: the inputs that have been read and have no result yet.
    """

    def __init__(
        self,
        path: Path,
        run_options: Mapping[str, Any],
        force: bool = False,
        resume: bool = False,
        keep: bool = True,
        header: Callable[[int], bytes] | None = None,
    ) -> None:
        """Check that the results can be written.

        path: OUT.
        run_options: JSON values that results depend on, by name. A run with other values cannot resume.
        force: overwrite existing files.
        resume: continue OUT.part if it exists.
        keep: whether OUT.part is kept after an error.
        header: from a number of inputs to the bytes before their results, of one length for any number.
        Raise OutputError for a file that may not be overwritten, or that this run cannot resume.
        """
        check_output_name(path)
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a regular file: give the name of a new or regular file to --output-file")
        self._path = path
        self._part, self._journal = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.json")
        self._run_options = json.loads(json.dumps(run_options))
        self._force, self._keep, self._header = force, keep, header
        self._header_bytes = len(header(0)) if header is not None else 0
        self._lines: deque[str] = deque()  # without a result
        self._file: BinaryIO | None = None
        self._started = False
        self._progress = self._recorded = (
            self._read_journal() if resume else _RunProgress()
        )  # of the run; in the journal
        self._next_record = 0.0  # time.monotonic()
        if not resume:
            self._journal_entry()  # this run would replace a file of the user that has the name of the journal
        if resume and not force and path.exists() and not self._part.exists():
            raise OutputError(f"{path} exists and {self._part} does not: there is nothing to resume")
        self._check_output()
        if not (resume or force) and self._part.exists():
            raise OutputError(
                f"{self._part} holds results of an interrupted run: give --resume to continue, or --force to start over"
            )

    @property
    def done(self) -> int:
        """The number of finished inputs."""
        return self._progress.inputs

    def rest(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the unfinished inputs.

        lines: all inputs. Raise OutputError if the finished ones changed since the earlier run.
        """
        source, skipped = iter(lines), _RunProgress()
        for line in islice(source, self.done):
            skipped = skipped.after(line, 0)
        if skipped.digest != self._progress.digest:
            raise OutputError(
                f"the first {self.done} inputs differ from the inputs whose results {self._part} holds: give the same "
                "inputs, or start over with --force"
            )
        self._start()
        for line in source:
            self._lines.append(line)
            yield line

    def add(self, results: str | bytes) -> None:
        """Append the results of the next input."""
        assert self._file is not None
        data = results.encode() if isinstance(results, str) else results
        with self._writing():
            self._file.write(data)
            self._progress = self._progress.after(self._lines[0], len(data))
            self._lines.popleft()
            unrecorded = self._progress.inputs - self._recorded.inputs
            if unrecorded >= JOURNAL_INTERVAL_RESULTS or time.monotonic() >= self._next_record:
                self._write_journal()

    def __enter__(self) -> ResultFile:
        with self._writing():
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # a link may lead to a file of another
            self._file = os.fdopen(os.open(self._part, flags, 0o666), "r+b")
        if sys.platform != "win32" and not lock_without_waiting(self._file):
            self._file.close()
            raise OutputError(f"another run is writing {self._part}")
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
                self._abandon(error)

    def _finish(self) -> None:
        """Rename OUT.part to OUT."""
        assert self._file is not None
        with self._writing():
            self._write_journal()
            if self._header is not None:
                self._file.seek(0)
                self._file.write(self._header(self.done))
                self._file.flush()
                os.fsync(self._file.fileno())
        self._check_output()
        with self._writing():
            self._file.close()
            self._part.replace(self._path)
            self._journal.unlink()

    def _abandon(self, error: BaseException) -> None:
        """Close the file, and keep the finished results."""
        assert self._file is not None
        with contextlib.suppress(OSError):  # on a full disk the previous journal remains true
            if self._started and not self._file.closed:
                self._write_journal()
        with contextlib.suppress(OSError):
            self._file.close()
        if not (self._recorded.inputs and self._keep):
            self._part.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
        elif self._started:
            error.add_note(f"--resume goes on after input {self._recorded.inputs}")

    def _read_journal(self) -> _RunProgress:
        """Return the progress of the earlier run; none if there is no journal."""
        found = self._journal_entry()
        if found is None or not self._part.exists():
            return _RunProgress()
        (progress, run_options), size = found, self._part.stat().st_size
        for name in {**run_options, **self._run_options}:
            new, old = self._run_options.get(name), run_options.get(name)
            if new != old:
                raise OutputError(
                    f"{quotable(name)} is {_describe(new)}, but was {_describe(old)} in the run that wrote "
                    f"{self._part}: give the same, or start over with --force"
                )
        if size < self._header_bytes + progress.bytes and progress.inputs:
            raise OutputError(f"{self._part} has lost results since they were written: start over with --force")
        return progress

    def _journal_entry(self) -> tuple[_RunProgress, dict[str, Any]] | None:
        """Return the progress and the options that the journal holds. Return None if there is no journal."""
        try:
            if self._journal.exists() and not self._journal.is_file():
                raise OutputError(f"{self._journal} is not a regular file: move it away")
            entry = json.loads(self._journal.read_text(encoding="utf-8"))
            if not isinstance(entry, dict) or not isinstance(entry.get("options"), dict):
                raise ValueError
            return _RunProgress.of(entry.get("progress")), entry["options"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{self._journal} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError):
            raise OutputError(
                f"{self._journal} is not a journal of tformer-run, whose place it takes: move it away"
            ) from None

    def _start(self) -> None:
        """Cut off results that are not in the journal. Write the journal first, so that it names no result cut off."""
        assert self._file is not None
        with self._writing():
            self._started = True
            self._write_journal()
            self._file.truncate(self._header_bytes + self._progress.bytes)
            self._file.seek(self._header_bytes + self._progress.bytes)

    def _write_journal(self) -> None:
        """Write the progress of the run to the disk: first the results, then the journal."""
        assert self._file is not None
        progress = self._progress
        self._file.flush()
        os.fsync(self._file.fileno())
        new = self._journal.with_name(f"{self._journal.name}.new")
        new.unlink(missing_ok=True)  # of a killed run, or a link that would lead to a file of another
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            json.dump({"progress": asdict(progress), "options": self._run_options}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._journal)
        self._recorded, self._next_record = progress, time.monotonic() + JOURNAL_INTERVAL_SECONDS

    def _check_output(self) -> None:
        if self._path.exists() and not self._force:
            raise OutputError(f"{self._path} exists already: give --force to overwrite it")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error.strerror or error}") from error


def _describe(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return {"null": "not given", "true": "given"}.get(text, quotable(text))
