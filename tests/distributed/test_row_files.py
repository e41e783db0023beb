"""Files of rows are cut into parts: the rows of all parts, in order, are the rows of the file, each once."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_runtime import InputError
from tformer_runtime.distributed import row_files
from tformer_runtime.distributed.columns import ResultColumns
from tformer_runtime.distributed.row_files import Results, format_of
from tformer_runtime.distributed.storage import Storage

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'tformer[ray]'")
parquet = pytest.importorskip("pyarrow.parquet")

NUMBERS = ResultColumns({"number": lambda pa: pa.int64()}, lambda result: {"number": result})


def parts_of(path, part_rows):
    """Return the parts of a file, and their rows."""
    form, storage = format_of([str(path)]), Storage(str(path))
    parts = form.scan(storage, part_rows)
    return parts, [form.read(storage, part) for part in parts]


def values_of(path, part_rows, name):
    """Return the values of a column in all parts. Check the numbers of rows."""
    parts, rows = parts_of(path, part_rows)
    assert [part.first for part in parts] == [sum(p.rows for p in parts[:i]) for i in range(len(parts))]
    assert all(part.rows == part_rows for part in parts[:-1])
    values = [row.values(name) for row in rows]
    assert [len(found) for found in values] == [part.rows for part in parts]
    return [value for found in values for value in found]


@pytest.mark.parametrize("part_rows", [1, 7, 100, 1000])
@pytest.mark.parametrize("groups", [1, 3, 64, 1000])
def test_parts_of_parquet(tmp_path, part_rows, groups):
    table = pa.table({"a": [f"row {i}" for i in range(101)], "b": list(range(101))})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=groups)
    assert values_of(tmp_path / "x.parquet", part_rows, "b") == list(range(101))


CELLS = st.text(st.sampled_from('ab",\n\r é☃'), max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=30), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_parts_of_csv(tmp_path_factory, rows, part_rows, chunk, marked):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    text = io.StringIO(newline="")
    # The module csv writes a lone carriage return without quotes, which parts rows.
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in rows for cell in row) else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows([("one", "two, three"), *rows])
    path.write_bytes((b"\xef\xbb\xbf" if marked else b"") + text.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_SCAN_BYTES", chunk)
        assert values_of(path, part_rows, "one") == [one for one, _ in rows]
        assert values_of(path, part_rows, "two, three") == [two for _, two in rows]
        assert format_of([str(path)]).columns(Storage(str(path))) == ["one", "two, three"]


@given(st.lists(st.text(st.sampled_from("ab\r é☃"), max_size=5), max_size=30), st.integers(1, 9), st.booleans())
def test_parts_of_texts(tmp_path_factory, lines, part_rows, ends):
    path = tmp_path_factory.mktemp("text") / "x.txt"
    lines = [line.rstrip("\r") for line in lines]
    lines[-1:] = [line + "a" for line in lines[-1:]]  # an empty last line without an end would be none
    path.write_bytes("\n".join(lines).encode() + (b"\n" if ends and lines else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_SCAN_BYTES", 7)
        assert values_of(path, part_rows, row_files.TEXT_COLUMN) == lines


def test_parts_of_json_lines(tmp_path):
    rows = [{"a": "\u2028" * (i % 3) + f"x\n{i}", "deep": [{"n": i}]} for i in range(50)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert values_of(tmp_path / "x.jsonl", 8, "a") == [row["a"] for row in rows]


def test_part_ends_with_the_row_that_reaches_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MAX_PART_BYTES", 100)
    lines = ["x" * random.Random(i).randrange(90) for i in range(40)]
    (tmp_path / "x.txt").write_text("".join(line + "\n" for line in lines))
    parts, rows = parts_of(tmp_path / "x.txt", 1000)
    assert [value for row in rows for value in row.values("input")] == lines
    assert all(100 <= part.end - part.start < 100 + 91 for part in parts[:-1])


def with_numbers(path, error_column=None, failing=()):
    """Return the content of the results of a file, for a model that numbers its rows."""
    (part,), (rows,) = parts_of(path, 1000)
    outcomes = [InputError("it is bad") if i in failing else i for i in range(part.rows)]
    return rows.with_results(Results(NUMBERS, {"number": "n"}, outcomes, error_column))


def test_results_of_parquet_keep_the_types_of_the_input(tmp_path):
    table = pa.table({"a": ["x", None], "b": pa.array([[1], []], pa.list_(pa.int8())), "c": [b"\xff", b""]})
    parquet.write_table(table, tmp_path / "x.parquet")
    result = parquet.read_table(io.BytesIO(with_numbers(tmp_path / "x.parquet", "why", {1})))
    assert result.drop_columns(["n", "why"]).equals(table)
    assert result.column("n").to_pylist() == [0, None]
    assert result.column("why").to_pylist() == [None, "it is bad"]


def test_results_of_csv(tmp_path):
    (tmp_path / "x.csv").write_bytes(b'a,b\n"1\r2",007\n,"say ""hi"""\n')
    assert with_numbers(tmp_path / "x.csv", "why", {1}).decode() == (
        'a,b,n,why\n"1\r2",007,0,\n,"say ""hi""",,it is bad\n'
    )


def test_results_of_json_lines_and_texts(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": {"b": 1.50}}\n')
    assert json.loads(with_numbers(tmp_path / "x.jsonl")) == {"a": {"b": 1.5}, "n": 0}
    (tmp_path / "x.txt").write_text("é\n")
    assert with_numbers(tmp_path / "x.txt").decode() == '{"input": "é", "n": 0}\n'


def test_rows_that_cannot_be_read_have_errors(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n[1]\n{"a": \n\xff\n{"a": 2}\n')
    _, (rows,) = parts_of(tmp_path / "x.jsonl", 10)
    assert {i: error.reason for i, error in rows.errors.items()} == {
        1: "'[1]' is not an object of JSON",
        2: "'{\"a\": ' is not an object of JSON",
        3: "it is not UTF-8",
    }
    assert rows.values("a") == [1, None, None, None, 2]
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,2\n3\n4,\xff\n5,6,7\n")
    _, (rows,) = parts_of(tmp_path / "x.csv", 10)
    assert {i: error.reason for i, error in rows.errors.items()} == {
        1: "it has 1 values, and the header has 2 names",
        2: "it is not UTF-8",
        3: "it has 3 values, and the header has 2 names",
    }


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.csv", "x.txt"])
def test_file_that_has_changed(tmp_path, name):
    path = tmp_path / name
    if name == "x.parquet":
        parquet.write_table(pa.table({"a": list(range(9))}), path)
    else:
        path.write_text("a\n" * 10)
    form, storage = format_of([name]), Storage(str(path))
    last = form.scan(storage, 4)[-1]
    if name == "x.parquet":
        parquet.write_table(pa.table({"a": [1]}), path)
    else:
        path.write_text("a\n")
    with pytest.raises(InputError, match="has changed"):
        form.read(storage, last)


def test_damaged_and_unknown_files(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="not a file of Parquet, or is damaged"):
        parts_of(tmp_path / "x.parquet", 10)
    with pytest.raises(InputError, match=r"ending \.gz: rows are read of \.parquet, "):
        format_of(["x.jsonl.gz"])
    with pytest.raises(InputError, match="two formats"):
        format_of(["a.csv", "b.txt"])
    with pytest.raises(InputError, match="no such file"):
        Storage(str(tmp_path / "nothing*.csv")).files()
    (tmp_path / "x.csv").write_text("a,a\n1,2\n")
    with pytest.raises(InputError, match="two columns of its header have one name"):
        format_of(["x.csv"]).columns(Storage(str(tmp_path / "x.csv")))


def test_patterns_and_folders(tmp_path):
    for name in ("b/2.csv", "b/10.csv", "a/1.csv", "a/.hidden.csv", "a/_journal.csv", "a/deep/3.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a\n")

    def names(pattern):
        return [file.name.removeprefix(f"{tmp_path}/") for file in Storage(f"{tmp_path}/{pattern}").files()]

    assert names("*/[0-9]*.csv") == ["a/1.csv", "b/10.csv", "b/2.csv"]
    assert names("a") == names("a/") == ["a/1.csv"]
    assert names("b/2.csv") == ["b/2.csv"]
    (of_uri,) = Storage(f"file://{tmp_path}/b/2.csv").files()
    assert of_uri == Storage(str(tmp_path / "b" / "2.csv")).files()[0]
