"""The lines of an input file, and the progress bar over them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tformer_runtime.base.errors import InputError

MAX_LINE_BYTES = 16 << 20


class InputLines:
    """The lines of a file, or of standard input ("-"), as text without line ends.

    size: bytes of the file; None for a pipe or a terminal.
    line_ends: the offset behind each line that has no result yet, in bytes; None until the progress bar needs it.
    Iterating raises InputError for a line that is too long or not UTF-8, and for a file that cannot be read.
    """

    def __init__(self, source: str) -> None:
        self.source, self.size = source, _regular_file_size(source)
        self.line_ends: deque[int] | None = None

    def __iter__(self) -> Iterator[str]:
        source, end = self.source, 0
        try:
            with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as file:
                for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                    if len(line) == MAX_LINE_BYTES:
                        raise InputError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB", number)
                    end += len(line)
                    if self.line_ends is not None:
                        self.line_ends.append(end)
                    try:
                        yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                    except UnicodeDecodeError:
                        raise InputError("it is not UTF-8", number) from None
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def progress_bar(lines: InputLines, finished: int) -> Iterator[Callable[[], None]]:
    """Show the number of finished inputs and the elapsed time on standard error.

    If the size of the input file is known, show the remaining time too. It is estimated from the bytes of the finished
    lines. finished: lines that an earlier run finished. Yield a callable for each result.
    """
    from rich.console import Console
    from rich.progress import (
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.fields[inputs]} inputs"), TimeElapsedColumn()]
    if lines.size:
        columns += [TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("remaining")]
    line_ends = lines.line_ends = deque()
    inputs, skipped = finished, finished
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=lines.size, inputs=inputs)

        def advance() -> None:
            nonlocal inputs, skipped
            inputs += 1
            for _ in range(min(skipped, len(line_ends))):
                line_ends.popleft()
            skipped = 0
            bar.update(task, inputs=inputs, completed=line_ends.popleft() if line_ends else None)

        yield advance


def _regular_file_size(source: str) -> int | None:
    try:
        status = os.fstat(sys.stdin.fileno()) if source == "-" else Path(source).stat()
    except (OSError, ValueError):  # reading raises the error, or standard input has no file descriptor
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
