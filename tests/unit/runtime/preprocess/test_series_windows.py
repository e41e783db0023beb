"""SeriesPreprocessor and its files: windows and batches of histories equal a computation in numpy, and invalid
histories are refused with their place.
"""

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
from tformer_runtime.tasks.forecasting import ForecastRequest, make_batches

RNG = np.random.default_rng(0)
HISTORY = 50 + 3 * RNG.standard_normal((9, 3))
MEAN, SCALE = (50.0, 49.0, 0.0), (3.0, 2.0, 1.0)


def series(**options):
    defaults = {"input": "x", "features": 3, "columns": ("a", "b", "c"), "targets": (2, 0), "feedback": (0, 1)}
    return SeriesPreprocessor(**{**defaults, **options})


@pytest.mark.parametrize("normalize", ["none", "fixed", "instance"])
def test_window_is_normalized_and_denormalized(normalize):
    preprocessor = series(normalize=normalize, mean=MEAN, scale=SCALE)
    window = preprocessor.window(HISTORY)
    mean, scale = {
        "none": (0, 1),
        "fixed": (np.array(MEAN), np.array(SCALE)),
        "instance": (HISTORY.mean(0), np.sqrt(HISTORY.var(0) + 1e-5)),
    }[normalize]
    assert window.values.dtype == np.float32
    np.testing.assert_allclose(window.values, (HISTORY - mean) / scale, rtol=1e-6)
    denormalized = preprocessor.denormalize(window.values[:, [2, 0]], window)
    assert denormalized.dtype == np.float32
    np.testing.assert_allclose(denormalized, HISTORY[:, [2, 0]], rtol=1e-6)


def test_truncated_window_has_the_last_rows():
    preprocessor = series(max_context_length=4, normalize="instance")
    last = preprocessor.window(HISTORY[-4:])
    np.testing.assert_array_equal(preprocessor.window(HISTORY, truncate=True).values, last.values)
    np.testing.assert_array_equal(
        preprocessor.window(HISTORY, room=2, truncate=True).values, preprocessor.window(HISTORY[-2:]).values
    )


def test_decoder_start_is_the_last_rows_or_fixed_values():
    window = series().window(HISTORY)
    np.testing.assert_array_equal(series(begin=2).decoder_start(window), window.values[-2:][:, [2, 0]])
    np.testing.assert_array_equal(series(begin=((0.5, -1.0),)).decoder_start(window), np.float32([[0.5, -1.0]]))


def nan_at(row, column, value=np.nan):
    history = HISTORY.copy()
    history[row, column] = value
    return history


@pytest.mark.parametrize(
    ("history", "options", "message"),
    [
        (HISTORY[:, :2], {}, "the history has the shape (9, 2): the model reads (time, 3), 3 numbers a row (a, b, c)"),
        (HISTORY[0], {}, "the history has the shape (3,): the model reads (time, 3)"),
        (nan_at(3, 1), {}, "row 4 of column 'b' is nan: fill gaps before"),
        (nan_at(3, 1), {"columns": ()}, "row 4 of column 2 is nan"),
        (nan_at(8, 0, np.inf), {}, "row 9 of column 'a' is inf"),
        (nan_at(0, 0, 1e300), {}, "the history holds numbers that are too large for float32"),
        (
            HISTORY,
            {"max_context_length": 4},
            "the history has 9 rows and the model reads at most 4: give the last of them",
        ),
        (HISTORY[:2], {"min_context_length": 5}, "the history has 2 rows and the model reads 5 at least"),
        ([["1", "x", "2"]], {}, "a history is an array of numbers, (time, 3): could not convert string to float"),
        ([[1, 2, 3], [1, 2]], {}, "a history is an array of numbers, (time, 3): "),
    ],
)
def test_invalid_history_is_refused_with_its_place(history, options, message):
    with pytest.raises(InputError) as caught:
        series(**options).window(history)
    assert message in str(caught.value)


def test_rows_of_errors_are_counted_before_truncation():
    with pytest.raises(InputError, match="row 8 of column 'c'"):
        series(max_context_length=4).window(nan_at(7, 2), truncate=True)
    window = series(max_context_length=4).window(nan_at(2, 2), truncate=True)  # rows before the window are not checked
    np.testing.assert_array_equal(window.values, HISTORY[-4:].astype(np.float32))


def test_horizon_is_an_option_or_a_default_of_the_file():
    assert series(horizon=7).steps(None) == 7
    assert series(horizon=7).steps(30) == 30
    assert series(horizon=7, at_once=True).steps(2) == 2
    for options, horizon, message in (
        ({}, None, "the file has no default horizon: set horizon"),
        ({}, 0, "horizon must be a whole number of at least 1, not 0"),
        (
            {"horizon": 7, "at_once": True},
            8,
            "horizon must be at most 7, the number of steps that the model returns, not 8",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            series(**options).steps(horizon)


def test_manifest_entry_round_trip():
    preprocessor = series(begin=((0.0, 1.0),), mean=MEAN, scale=SCALE, max_context_length=8, horizon=3)
    manifest = Toy().manifest()
    assert SeriesPreprocessor.of(manifest) is None
    manifest = Manifest.from_json(
        json.dumps(json.loads(manifest.to_json()) | {"preprocessing": {"x": as_json(preprocessor.manifest_entry)}})
    )
    assert SeriesPreprocessor.of(manifest) == preprocessor
    damaged = Preprocessing("series", {"features": 3, "colour": "red"})
    manifest = Manifest.from_json(
        json.dumps(json.loads(manifest.to_json()) | {"preprocessing": {"x": as_json(damaged)}})
    )
    with pytest.raises(ModelFileError, match="the series settings of the file are damaged"):
        SeriesPreprocessor.of(manifest)


def as_json(preprocessing):
    return {"kind": preprocessing.kind, "numbers": preprocessing.numbers}


def write_text(tmp_path, text, name="history.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def test_columns_are_selected_by_name(tmp_path):
    path = write_text(tmp_path, "\ufeffday,b, a\r\n2020-01-01,1,2.5\r\n\r\n2020-01-02,3e2,-4\r\n")
    np.testing.assert_array_equal(read_series(path, ["a", "b"], 2), [[2.5, 1], [-4, 300]])
    tabs = write_text(tmp_path, 'b\ta\n1\t"2"\n', "history.tsv")
    np.testing.assert_array_equal(read_series(tabs, ["a", "b"], 2), [[2, 1]])


def test_columns_of_a_model_without_names_are_read_in_order(tmp_path):
    for text in ("1,2\n3,4\n", "load,wind\n1,2\n3,4\n"):
        np.testing.assert_array_equal(read_series(write_text(tmp_path, text), [], 2), [[1, 2], [3, 4]])


def test_npy_file_is_read_as_float64(tmp_path):
    np.save(tmp_path / "history.npy", HISTORY.astype(np.float32))
    actual = read_series(str(tmp_path / "history.npy"), ["a", "b", "c"], 3)
    assert actual.dtype == np.float64
    np.testing.assert_array_equal(actual, HISTORY.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,c\n1,2\n", "has no column 'b': the model reads a, b, and the file's first line has a, c"),
        ("1,2\n", "has no column 'a', 'b'"),
        ("a,b\n1,2\n\n3,n/a\n", ", line 4: 'n/a' in column 'b' is not a number"),
        ("a,b\n1,2\n3\n", ", line 3: column 'b' is empty"),
        ("a,b\n1,2\n3,\n", ", line 3: column 'b' is empty"),
    ],
)
def test_invalid_table_is_refused_with_its_line(tmp_path, text, message):
    path = write_text(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_series(path, ["a", "b"], 2)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_unreadable_file_is_refused(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    np.save(tmp_path / "texts.npy", np.array(["a", "b"]))
    for path, message in (
        (tmp_path / "none.csv", "cannot be read: No such file or directory"),
        (tmp_path / "bytes.csv", "is not UTF-8 text: a history is a CSV file or numpy's .npy"),
        (tmp_path / "texts.npy", "holds no array of numbers"),
        (write_text(tmp_path, "no array", "other.npy"), "is not an array in numpy's format"),
        (write_text(tmp_path, "1,2,3\n"), "has 3 columns and the model reads 2"),
    ):
        with pytest.raises(InputError, match=message):
            read_series(str(path), [], 2)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ragged", [True, False])
def test_histories_of_similar_length_share_a_batch_and_keep_their_order(ragged, workers):
    lengths = [5, 2, 9, 2, 5, 5, 7, 2]
    batches = []

    def run(rows):
        batches.append([len(row.window.values) for row in rows])
        for row in rows:
            row.forecast = row.window.values[:1, :1]

    rows = [ForecastRequest(i, series().window(np.full((n, 3), i, float))) for i, n in enumerate(lengths)]
    runner = BatchRunner(lambda window: make_batches(window, ragged, 3), run, workers)
    results = list(in_order(rows, runner, lambda row: row.forecast.item(), WindowLimits(48)))
    assert results == list(range(8))
    assert sorted(n for batch in batches for n in batch) == sorted(lengths)
    assert max(map(len, batches)) == 3
    assert ragged or all(len(set(batch)) == 1 for batch in batches)
    assert len(batches) == (3 if ragged else 4)


def test_invalid_history_is_reported_after_earlier_results():
    def requests():
        yield ForecastRequest(0, series().window(HISTORY))
        raise InputError("input 2: it is not one")

    runner = BatchRunner(lambda window: [window], lambda batch: None)
    results = in_order(requests(), runner, lambda request: request.window.values, WindowLimits(64))
    np.testing.assert_allclose(next(results), HISTORY.astype(np.float32))
    with pytest.raises(InputError, match="input 2"):
        next(results)
