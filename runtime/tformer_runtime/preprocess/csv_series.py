"""Read series from files: CSV with a header, or numpy's .npy."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from tformer_runtime.base.arrays import F64
from tformer_runtime.base.errors import InputError, quotable

MAX_LINE_CHARS = 1 << 24
MAX_NUMBERS = 1 << 25  # 256 MiB


class _Reader(Protocol):
    """csv's reader, whose type has no name."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Iterator[list[str]]: ...


def read_series(path: str, columns: Sequence[str], features: int) -> F64:
    """Return the series (time, features) of a file as float64.

    path: a .npy file or a CSV file, with tabs in a .tsv; "-" for CSV on standard input.
    columns: names of CSV columns to read, in any order in the file; empty for a CSV of `features` columns, with or
        without a header.
    features: the number of columns.
    Raise InputError with the line and the column of a cell that is not a number, and for missing columns. Cost: 8 bytes
    a number.
    """
    if "\0" in path:
        raise InputError(f"{path!r} is not a name of a file: give that of a history")
    try:
        if path.endswith(".npy"):
            return _array(path)
        if path == "-":
            text = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline="")
            try:
                return _table(text, path, columns, features)
            finally:
                text.detach()  # standard input stays open
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return _table(file, path, columns, features)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise InputError(f"{path!r} is not a name of a file: give that of a history") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: a history is a CSV file or numpy's .npy") from error


def _array(path: str) -> F64:
    try:
        # An array that is mapped has its size checked against that of the file. np.load would allocate it first.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses a header as Python, which raises errors of its tokenizer too
        raise InputError(f"{path} is not an array in numpy's format, or is cut off") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise InputError(f"{path} holds no array of numbers")
    if values.size > MAX_NUMBERS:
        raise _too_long(path)
    return np.array(values, np.float64)


def _table(file: IO[str], path: str, columns: Sequence[str], features: int) -> F64:
    import csv  # models without series do not need it

    reader = csv.reader(_lines(file, path), delimiter="\t" if path.endswith(".tsv") else ",")
    try:
        return _rows(reader, path, columns, features)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error


def _lines(file: IO[str], path: str) -> Iterator[str]:
    """Yield the lines of a file, or of a device that never ends."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_CHARS), ""), 1):
        if len(line) == MAX_LINE_CHARS:
            raise InputError(f"{path}, line {number}: it is longer than {MAX_LINE_CHARS:,} characters")
        yield line


def _rows(reader: _Reader, path: str, columns: Sequence[str], features: int) -> F64:
    """Return the numbers of a table. reader: its rows, as lists of cells."""
    import array  # as csv

    rows = (row for row in reader if any(cell.strip() for cell in row))
    first = next(rows, None)
    if first is None:
        raise InputError(f"{path} is empty")
    header = [cell.strip() for cell in first]
    numbers = array.array("d")
    if columns:
        missing = [name for name in columns if name not in header]
        if missing:
            raise InputError(
                f"{path} has no column {', '.join(map(repr, missing))}: the model reads {', '.join(columns)}, and the "
                f"file's first line has {quotable(', '.join(header))}"
            )
        indices, names = [header.index(name) for name in columns], list(columns)
    else:
        if len(header) != features:
            raise InputError(f"{path} has {len(header)} columns and the model reads {features}")
        indices, names = list(range(features)), [str(i + 1) for i in range(features)]
        if all(map(_is_number, header)):
            numbers.extend(map(float, header))
        else:
            names = header
    for row in rows:
        numbers.extend(_numbers(row, f"{path}, line {reader.line_num}", indices, names))
        if len(numbers) > MAX_NUMBERS:
            raise _too_long(path)
    return np.array(numbers, np.float64).reshape(-1, len(indices))


def _numbers(row: Sequence[str], place: str, indices: Sequence[int], names: Sequence[str]) -> Iterator[float]:
    for index, name in zip(indices, names, strict=True):
        cell = row[index].strip() if index < len(row) else ""
        try:
            yield float(cell)
        except ValueError:
            name = quotable(name)
            reason = f"{cell[:40]!r} in column {name!r} is not a number" if cell else f"column {name!r} is empty"
            raise InputError(f"{place}: {reason}") from None


def _too_long(path: str) -> InputError:
    return InputError(f"{path} has more than {MAX_NUMBERS:,} numbers: give its last rows")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
