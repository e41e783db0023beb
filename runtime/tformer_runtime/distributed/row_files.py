"""Files of rows: Parquet, JSON lines, CSV and text. A job cuts them into parts of a fixed number of rows.

A part of a text file begins and ends at a byte. `scan` reads a file once to find the ends of its rows; of a Parquet
file it reads the description alone.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.errors import InputError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.distributed.columns import (
    ResultColumns,
    arrow_columns,
    import_pyarrow,
    json_value,
)
from tformer_runtime.distributed.storage import Storage

MAX_PART_BYTES = 64 << 20  # of a part of a text file, which ends with the row that reaches them
_SCAN_BYTES = 8 << 20
TEXT_COLUMN = "input"  # the name of the only column of a text file


class FilePart(Struct, frozen=True):
    """Rows of a file. rows: their number. first: the number of rows before them. start, end: bytes of a text file."""

    first: int
    rows: int
    start: int = 0
    end: int = 0


class Results(Struct, frozen=True):
    """The results of the rows of a part.

    columns: of the results. chosen: column of a result → its name in the output.
    outcomes: a result for each row, or its error.
    error_column: of the output; None if there is none, because any error ends the job.
    """

    columns: ResultColumns
    chosen: Mapping[str, str]
    outcomes: Sequence[Any]
    error_column: str | None

    @property
    def failed(self) -> list[bool]:
        return [isinstance(outcome, Exception) for outcome in self.outcomes]

    def reasons(self) -> list[str | None]:
        """Return the sentence of the error of each row; None for a row with a result."""
        return [o.reason if bad else None for o, bad in zip(self.outcomes, self.failed, strict=True)]

    def json_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the new columns of each row, as JSON values."""
        for outcome, reason in zip(self.outcomes, self.reasons(), strict=True):
            fields = {} if reason is not None else self.columns.fields(outcome)
            row = {output: json_value(fields.get(name)) for name, output in self.chosen.items()}
            yield row if self.error_column is None else {**row, self.error_column: reason}


class RowsOfPart(ABC):
    """The rows of a part that were read.

    columns: names that at least one row has.
    errors: number of a row in the part, from 0 → the error of a row that cannot be read.
    """

    columns: Sequence[str]
    errors: Mapping[int, InputError] = {}

    @abstractmethod
    def values(self, name: str) -> list[Any]:
        """Return the values of a column. Rows without it have None."""

    @abstractmethod
    def with_results(self, results: Results) -> bytes:
        """Return the content of the file of the results: the rows with new columns."""


class RowFormat(ABC):
    """A format of files.

    ending: of the files of its results.
    unit: the word for a row in messages.
    has_columns: whether all rows of a file have the same columns.
    """

    ending: str
    unit = "row"
    has_columns = True

    @abstractmethod
    def scan(self, file: Storage, part_rows: int) -> list[FilePart]:
        """Return the parts of a file. Raise InputError for a file that cannot be read."""

    @abstractmethod
    def columns(self, file: Storage) -> list[str]:
        """Return the names of the columns of a file; of its first row if the rows have different ones."""

    @abstractmethod
    def read(self, file: Storage, part: FilePart) -> RowsOfPart:
        """Read a part. Raise InputError if that fails."""


class _Parquet(RowFormat):
    ending = ".parquet"

    def scan(self, file: Storage, part_rows: int) -> list[FilePart]:
        with _parquet(file) as opened:
            rows = opened.metadata.num_rows
        return [FilePart(first, min(part_rows, rows - first)) for first in range(0, rows, part_rows)]

    def columns(self, file: Storage) -> list[str]:
        with _parquet(file) as opened:
            return list(opened.schema_arrow.names)

    def read(self, file: Storage, part: FilePart) -> RowsOfPart:
        """Read the groups of rows that have rows of the part, a batch at a time."""
        pa = import_pyarrow()
        with _parquet(file) as opened:
            groups: list[int] = []
            first = begin = 0
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if first < part.first + part.rows and first + rows > part.first:
                    begin = begin if groups else first
                    groups.append(group)
                first += rows
            pieces, at = [], begin
            for batch in opened.iter_batches(max(part.rows, 1024), row_groups=groups):
                low, high = max(part.first - at, 0), min(part.first + part.rows - at, len(batch))
                if low < high:
                    pieces.append(batch.slice(low, high - low))
                at += len(batch)
                if at >= part.first + part.rows:
                    break
            table = pa.Table.from_batches(pieces, opened.schema_arrow)
        if len(table) != part.rows:
            raise InputError(f"{file.name} has changed: it has fewer rows than before")
        return _TableRows(table)


class _parquet:  # noqa: N801  # a context manager that reads like a function
    """Opens a file of Parquet. Raise InputError for another file."""

    def __init__(self, file: Storage) -> None:
        self._file, self._opened = file, file.open()
        self._errors = import_pyarrow().ArrowException

    def __enter__(self) -> Any:
        parquet = import_optional("pyarrow.parquet", "Parquet needs pyarrow", "ray")
        try:
            return parquet.ParquetFile(self._opened.__enter__())
        except self._errors as error:
            self._opened.__exit__(None, None, None)
            raise self._damaged(error) from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._opened.__exit__(kind, error, trace)
        if isinstance(error, self._errors):
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> InputError:
        return InputError(
            f"{self._file.name} is not a file of Parquet, or is damaged: {' '.join(str(error).split())[:200]}"
        )


class _TableRows(RowsOfPart):
    def __init__(self, table: Any) -> None:
        self._table = table
        self.columns = list(table.column_names)

    def values(self, name: str) -> list[Any]:
        column: list[Any] = self._table.column(name).to_pylist()
        return column

    def with_results(self, results: Results) -> bytes:
        pa = import_pyarrow()
        parquet = import_optional("pyarrow.parquet", "Parquet needs pyarrow", "ray")
        table = self._table
        new = arrow_columns(results.columns, results.chosen, results.outcomes, results.failed)
        for name, array in new.items():
            table = table.append_column(name, array)
        if results.error_column is not None:
            table = table.append_column(results.error_column, pa.array(results.reasons(), pa.string()))
        buffer = io.BytesIO()
        parquet.write_table(table, buffer)
        return buffer.getvalue()


class _Lines(RowFormat):
    """Formats whose rows end with a line break. quoted: a line break between quotes ends no row."""

    quoted = False

    def scan(self, file: Storage, part_rows: int) -> list[FilePart]:
        parts: list[FilePart] = []
        with file.open() as opened:
            start = self._begin(file, opened)
            opened.seek(start)
            first = rows = 0
            for end in _row_ends(opened, start, self.quoted):
                rows += 1
                if rows == part_rows or end - start >= MAX_PART_BYTES:
                    parts.append(FilePart(first, rows, start, end))
                    first, rows, start = first + rows, 0, end
                last = end
            if rows:
                parts.append(FilePart(first, rows, start, last))
        return parts

    def _begin(self, file: Storage, opened: Any) -> int:
        """Return the place of the first row: behind a mark of the byte order."""
        return 3 if opened.read(3) == b"\xef\xbb\xbf" else 0

    def _read_bytes(self, file: Storage, part: FilePart) -> bytes:
        with file.open() as opened:
            opened.seek(part.start)
            content: bytes = opened.read(part.end - part.start)
        if len(content) != part.end - part.start:
            raise InputError(f"{file.name} has changed: it is shorter than before")
        return content

    def _lines(self, file: Storage, part: FilePart) -> tuple[list[str], dict[int, InputError]]:
        """Return the lines of a part, and the errors of lines that are not UTF-8."""
        content = self._read_bytes(file, part)
        lines = content.removesuffix(b"\n").split(b"\n")
        if len(lines) != part.rows:
            raise InputError(f"{file.name} has changed: it has other rows than before")
        texts = [line.removesuffix(b"\r").decode("utf-8", "surrogateescape") for line in lines]
        return texts, {i: InputError("it is not UTF-8") for i, text in enumerate(texts) if _is_damaged(text)}


def _row_ends(opened: Any, start: int, quoted: bool) -> Iterator[int]:
    """Yield the place behind each row of a file that is at its first row."""
    at = end = start
    quotes = 0
    while chunk := opened.read(_SCAN_BYTES):
        signs = np.frombuffer(chunk, np.uint8)
        breaks = np.flatnonzero(signs == ord("\n"))
        if quoted:
            counts = quotes + np.cumsum(signs == ord('"'), dtype=np.int64)
            breaks, quotes = breaks[counts[breaks] % 2 == 0], int(counts[-1])
        for place in (breaks + at + 1).tolist():
            yield place
            end = place
        at += len(chunk)
    if at > end:
        yield at


def _is_damaged(text: str) -> bool:
    """Return whether a text that was read had bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


class _Text(_Lines):
    ending = ".jsonl"
    unit = "line"

    def columns(self, file: Storage) -> list[str]:
        return [TEXT_COLUMN]

    def read(self, file: Storage, part: FilePart) -> RowsOfPart:
        lines, errors = self._lines(file, part)
        return _JsonRows([{TEXT_COLUMN: line} for line in lines], errors)


class _JsonLines(_Lines):
    ending = ".jsonl"
    unit = "line"
    has_columns = False

    def columns(self, file: Storage) -> list[str]:
        with file.open() as opened:
            start = self._begin(file, opened)
            opened.seek(start)
            end = next(_row_ends(opened, start, False), start)
        return [] if end == start else list(self.read(file, FilePart(0, 1, start, end)).columns)

    def read(self, file: Storage, part: FilePart) -> RowsOfPart:
        lines, errors = self._lines(file, part)
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("no object")
            except (ValueError, RecursionError):
                row = {"line": line}
                errors.setdefault(number, InputError(f"{line[:60]!r} is not an object of JSON"))
            rows.append(row)
        return _JsonRows(rows, errors)


class _JsonRows(RowsOfPart):
    def __init__(self, rows: Sequence[dict[str, Any]], errors: Mapping[int, InputError]) -> None:
        self._rows, self.errors = rows, errors
        self.columns = list(dict.fromkeys(name for row in rows for name in row))

    def values(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def with_results(self, results: Results) -> bytes:
        merged = ({**row, **new} for row, new in zip(self._rows, results.json_rows(), strict=True))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in merged)
        return text.encode("utf-8", "backslashreplace")


class _Csv(_Lines):
    ending = ".csv"
    quoted = True

    def _begin(self, file: Storage, opened: Any) -> int:
        """Return the place of the first row: behind the header."""
        start = super()._begin(file, opened)
        opened.seek(start)
        return next(_row_ends(opened, start, True), start)

    def columns(self, file: Storage) -> list[str]:
        with file.open() as opened:
            header = opened.read(self._end_of_header(file)).decode("utf-8-sig", "backslashreplace")
        names = next(csv.reader(io.StringIO(header, newline="")), [])
        if len(set(names)) < len(names):
            raise InputError(f"{file.name}: two columns of its header have one name")
        return names

    def _end_of_header(self, file: Storage) -> int:
        with file.open() as opened:
            return self._begin(file, opened)

    def read(self, file: Storage, part: FilePart) -> RowsOfPart:
        names = self.columns(file)
        csv.field_size_limit(MAX_PART_BYTES)
        text = self._read_bytes(file, part).decode("utf-8", "surrogateescape")
        try:
            rows = list(csv.reader(io.StringIO(text, newline="")))
        except csv.Error as error:
            raise InputError(f"{file.name}, rows {part.first + 1} to {part.first + part.rows}: {error}") from error
        if len(rows) != part.rows:
            raise InputError(
                f"{file.name}, rows {part.first + 1} to {part.first + part.rows}: a quote in a value is not doubled, "
                "or lines end in another way than with a line feed"
            )
        return _CsvRows(names, rows)


class _CsvRows(RowsOfPart):
    def __init__(self, names: list[str], rows: list[list[str]]) -> None:
        self.columns, self._rows = names, rows
        self.errors = {}
        for number, row in enumerate(rows):
            if len(row) != len(names):
                self.errors[number] = InputError(f"it has {len(row)} values, and the header has {len(names)} names")
                row += [""] * (len(names) - len(row))
            elif any(map(_is_damaged, row)):
                self.errors[number] = InputError("it is not UTF-8")

    def values(self, name: str) -> list[Any]:
        place = self.columns.index(name)
        return [row[place] for row in self._rows]

    def with_results(self, results: Results) -> bytes:
        new = [*results.chosen.values(), *([results.error_column] if results.error_column is not None else [])]
        lines = [_csv_line([*self.columns, *new])]
        for row, fields in zip(self._rows, results.json_rows(), strict=True):
            lines.append(_csv_line([*row[: len(self.columns)], *(_cell(fields[name]) for name in new)]))
        return "".join(lines).encode("utf-8", "backslashreplace")


def _csv_line(cells: Sequence[str]) -> str:
    """Return a line of CSV. The module csv writes a lone carriage return without quotes, and then cannot read it."""
    quoted = ('"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\r\n') else cell for cell in cells)
    return ",".join(quoted) + "\n"


def _cell(value: Any) -> str:
    """Return a value as a cell of CSV: lists and mappings as JSON, and nothing for null."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


PARQUET, JSON_LINES, CSV, TEXT = _Parquet(), _JsonLines(), _Csv(), _Text()
_FORMATS: dict[str, RowFormat] = {
    ".parquet": PARQUET, ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".csv": CSV, ".txt": TEXT
}  # fmt: skip


def format_of(names: Sequence[str]) -> RowFormat:
    """Return the format of files by their endings. Raise InputError for another ending, and for several formats."""
    found: dict[RowFormat, str] = {}
    for name in names:
        ending = PurePosixPath(name.partition("?")[0]).suffix.lower()
        if ending not in _FORMATS:
            raise InputError(
                f"{name} has the ending {ending or 'of no format'}: rows are read of {', '.join(_FORMATS)}"
            )
        found[_FORMATS[ending]] = name
    if len(found) > 1:
        one, other, *_ = found.values()
        raise InputError(f"{one} and {other} have two formats: give files of one format")
    return next(iter(found))
