"""Read series from files: CSV with a header, or numpy's .npy."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from tformer_runtime.base.arrays import F64
from tformer_runtime.base.errors import InputError


def read_series(path: str, columns: Sequence[str], features: int) -> F64:
    """Return the series (time, features) of a file as float64.

    path: a .npy file or a CSV file, with tabs in a .tsv; "-" for CSV on standard input.
    columns: names of CSV columns to read, in any order in the file; empty for a CSV of `features` columns, with or
        without a header.
    features: the number of columns.
    Raise InputError with the line and the column of a cell that is not a number, and for missing columns. The whole
    file is in memory.
    """
    if "\0" in path:
        raise InputError(f"{path!r} is no name of a file: give that of a history")
    try:
        if path.endswith(".npy"):
            return _array(path)
        if path == "-":
            return _table(io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline=""), path, columns, features)
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return _table(file, path, columns, features)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: a history is a CSV file or numpy's .npy") from error


def _array(path: str) -> F64:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is not an array in numpy's format") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise InputError(f"{path} holds no array of numbers")
    return values.astype(np.float64)


def _table(file: IO[str], path: str, columns: Sequence[str], features: int) -> F64:
    reader = csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",")
    try:
        lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error
    if not lines:
        raise InputError(f"{path} is empty")
    header = [cell.strip() for cell in lines[0][1]]
    if columns:
        missing = [name for name in columns if name not in header]
        if missing:
            raise InputError(
                f"{path} has no column {', '.join(map(repr, missing))}: the model reads {', '.join(columns)}, and the "
                f"file's first line has {', '.join(header)}"
            )
        indices, names = [header.index(name) for name in columns], list(columns)
        lines = lines[1:]
    else:
        if len(header) != features:
            raise InputError(f"{path} has {len(header)} columns and the model reads {features}")
        indices, names = list(range(features)), [str(i + 1) for i in range(features)]
        if not all(map(_is_number, header)):
            names, lines = header, lines[1:]
    return _numbers(lines, path, indices, names)


def _numbers(lines: Iterable[tuple[int, list[str]]], path: str, indices: Sequence[int], names: Sequence[str]) -> F64:
    rows = []
    for number, row in lines:
        values = []
        for index, name in zip(indices, names, strict=True):
            cell = row[index].strip() if index < len(row) else ""
            try:
                values.append(float(cell))
            except ValueError:
                reason = f"{cell[:40]!r} in column {name!r} is not a number" if cell else f"column {name!r} is empty"
                raise InputError(f"{path}, line {number}: {reason}") from None
        rows.append(values)
    return np.array(rows, np.float64).reshape(len(rows), len(indices))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
