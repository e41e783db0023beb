"""Histories as models read them, against numpy, and what is said of those that they cannot read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.toy_models import Toy

from tformer_runtime import InputError, ModelFileError, OptionError
from tformer_runtime.decoding.ordered import BatchRunner, WindowLimits, in_order
from tformer_runtime.format.manifest import Manifest, Preprocessing
from tformer_runtime.preprocess.csv_series import read_series
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks.forecasting import ForecastRequest, _make_batches

RNG = np.random.default_rng(0)
HISTORY = 50 + 3 * RNG.standard_normal((9, 3))
MEAN, SCALE = (50.0, 49.0, 0.0), (3.0, 2.0, 1.0)


def series(**said):
    given = {"input": "x", "features": 3, "columns": ("a", "b", "c"), "targets": (2, 0), "feedback": (0, 1)}
    return SeriesPreprocessor(**{**given, **said})


@pytest.mark.parametrize("normalize", ["none", "fixed", "instance"])
def test_a_window_is_normalised_and_turned_back(normalize):
    of = series(normalize=normalize, mean=MEAN, scale=SCALE)
    window = of.window(HISTORY)
    mean, scale = {
        "none": (0, 1),
        "fixed": (np.array(MEAN), np.array(SCALE)),
        "instance": (HISTORY.mean(0), np.sqrt(HISTORY.var(0) + 1e-5)),
    }[normalize]
    assert window.values.dtype == np.float32
    np.testing.assert_allclose(window.values, (HISTORY - mean) / scale, rtol=1e-6)
    back = of.denormalize(window.values[:, [2, 0]], window)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, HISTORY[:, [2, 0]], rtol=1e-6)


def test_a_window_has_the_last_rows_where_that_is_asked_for():
    of = series(longest=4, normalize="instance")
    last = of.window(HISTORY[-4:])
    np.testing.assert_array_equal(of.window(HISTORY, truncate=True).values, last.values)
    np.testing.assert_array_equal(of.window(HISTORY, room=2, truncate=True).values, of.window(HISTORY[-2:]).values)


def test_what_a_decoder_begins_with():
    window = series().window(HISTORY)
    np.testing.assert_array_equal(series(begin=2).decoder_start(window), window.values[-2:][:, [2, 0]])
    np.testing.assert_array_equal(series(begin=((0.5, -1.0),)).decoder_start(window), np.float32([[0.5, -1.0]]))


def nan_at(row, column, value=np.nan):
    history = HISTORY.copy()
    history[row, column] = value
    return history


@pytest.mark.parametrize(
    ("history", "said", "sentence"),
    [
        (HISTORY[:, :2], {}, "the history has the shape (9, 2): the model reads (time, 3), 3 numbers a row (a, b, c)"),
        (HISTORY[0], {}, "the history has the shape (3,): the model reads (time, 3)"),
        (nan_at(3, 1), {}, "row 4 of column 'b' is nan: fill gaps before"),
        (nan_at(3, 1), {"columns": ()}, "row 4 of column 2 is nan"),
        (nan_at(8, 0, np.inf), {}, "row 9 of column 'a' is inf"),
        (nan_at(0, 0, 1e300), {}, "the history holds numbers that are too large for float32"),
        (HISTORY, {"longest": 4}, "the history has 9 rows and the model reads at most 4: give the last of them"),
        (HISTORY[:2], {"shortest": 5}, "the history has 2 rows and the model reads 5 at least"),
        ([["1", "x", "2"]], {}, "a history is an array of numbers, (time, 3): could not convert string to float"),
        ([[1, 2, 3], [1, 2]], {}, "a history is an array of numbers, (time, 3): "),
    ],
)
def test_what_cannot_be_read_is_said(history, said, sentence):
    with pytest.raises(InputError) as caught:
        series(**said).window(history)
    assert sentence in str(caught.value)


def test_rows_are_counted_in_what_was_given_where_it_is_cut():
    with pytest.raises(InputError, match="row 8 of column 'c'"):
        series(longest=4).window(nan_at(7, 2), truncate=True)
    series(longest=4).window(nan_at(2, 2), truncate=True)  # of what is not read, nothing is asked


def test_horizons():
    assert series(horizon=7).steps(None) == 7
    assert series(horizon=7).steps(30) == 30
    assert series(horizon=7, at_once=True).steps(2) == 2
    for said, asked, sentence in (
        ({}, None, "say how many steps to forecast, for the file does not"),
        ({}, 0, "horizon must be a whole number of at least 1, not 0"),
        ({"horizon": 7, "at_once": True}, 8, "horizon must be at most 7, which the model gives at once, not 8"),
    ):
        with pytest.raises(OptionError, match=sentence):
            series(**said).steps(asked)


def test_a_series_comes_back_from_the_manifest():
    of = series(begin=((0.0, 1.0),), mean=MEAN, scale=SCALE, longest=8, horizon=3)
    held = Toy().manifest()
    assert SeriesPreprocessor.of(held) is None
    held = Manifest.from_json(
        json.dumps(json.loads(held.to_json()) | {"preprocessing": {"x": as_json(of.manifest_entry)}})
    )
    assert SeriesPreprocessor.of(held) == of
    damaged = Preprocessing("series", {"features": 3, "colour": "red"})
    held = Manifest.from_json(json.dumps(json.loads(held.to_json()) | {"preprocessing": {"x": as_json(damaged)}}))
    with pytest.raises(ModelFileError, match="what the file says of its series is damaged"):
        SeriesPreprocessor.of(held)


def as_json(preparation):
    return {"kind": preparation.kind, "numbers": preparation.numbers}


def written(tmp_path, text, name="history.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def test_columns_are_found_by_their_names(tmp_path):
    path = written(tmp_path, "\ufeffday,b, a\r\n2020-01-01,1,2.5\r\n\r\n2020-01-02,3e2,-4\r\n")
    np.testing.assert_array_equal(read_series(path, ["a", "b"], 2), [[2.5, 1], [-4, 300]])
    tabs = written(tmp_path, 'b\ta\n1\t"2"\n', "history.tsv")
    np.testing.assert_array_equal(read_series(tabs, ["a", "b"], 2), [[2, 1]])


def test_columns_without_names_are_taken_in_order(tmp_path):
    for text in ("1,2\n3,4\n", "load,wind\n1,2\n3,4\n"):
        np.testing.assert_array_equal(read_series(written(tmp_path, text), [], 2), [[1, 2], [3, 4]])


def test_arrays(tmp_path):
    np.save(tmp_path / "history.npy", HISTORY.astype(np.float32))
    found = read_series(str(tmp_path / "history.npy"), ["a", "b", "c"], 3)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, HISTORY.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("a,c\n1,2\n", "has no column 'b': the model reads a, b, and the file's first line has a, c"),
        ("1,2\n", "has no column 'a', 'b'"),
        ("a,b\n1,2\n\n3,n/a\n", ", line 4: 'n/a' in column 'b' is not a number"),
        ("a,b\n1,2\n3\n", ", line 3: column 'b' is empty"),
        ("a,b\n1,2\n3,\n", ", line 3: column 'b' is empty"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, text, sentence):
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_series(path, ["a", "b"], 2)
    assert str(caught.value).startswith(path)
    assert sentence in str(caught.value)


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    np.save(tmp_path / "texts.npy", np.array(["a", "b"]))
    for path, sentence in (
        (tmp_path / "none.csv", "cannot be read: No such file or directory"),
        (tmp_path / "bytes.csv", "is not UTF-8 text: a history is a CSV file or numpy's .npy"),
        (tmp_path / "texts.npy", "holds no array of numbers"),
        (written(tmp_path, "no array", "other.npy"), "is not an array in numpy's format"),
        (written(tmp_path, "1,2,3\n"), "has 3 columns and the model reads 2"),
    ):
        with pytest.raises(InputError, match=sentence):
            read_series(str(path), [], 2)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ragged", [True, False])
def test_histories_of_like_length_are_read_together_and_given_back_in_order(ragged, workers):
    lengths = [5, 2, 9, 2, 5, 5, 7, 2]
    batches = []

    def run(rows):
        batches.append([len(row.window.values) for row in rows])
        for row in rows:
            row.forecast = row.window.values[:1, :1]

    rows = [ForecastRequest(i, series().window(np.full((n, 3), i, float))) for i, n in enumerate(lengths)]
    runner = BatchRunner(lambda window: _make_batches(window, ragged, 3), run, workers)
    found = list(in_order(rows, runner, lambda row: row.forecast.item(), WindowLimits(48)))
    assert found == list(range(8))
    assert sorted(n for batch in batches for n in batch) == sorted(lengths)
    assert max(map(len, batches)) == 3
    assert ragged or all(len(set(batch)) == 1 for batch in batches)
    assert len(batches) == (3 if ragged else 4)


def test_a_history_that_cannot_be_read_is_told_after_the_results_before_it():
    def requests():
        yield ForecastRequest(0, series().window(HISTORY))
        raise InputError("input 2: it is not one")

    runner = BatchRunner(lambda window: [window], lambda batch: None)
    found = in_order(requests(), runner, lambda request: request.window.values, WindowLimits(64))
    np.testing.assert_allclose(next(found), HISTORY.astype(np.float32))
    with pytest.raises(InputError, match="input 2"):
        next(found)
