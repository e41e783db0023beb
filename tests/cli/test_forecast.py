"""tformer-run forecasts from histories in files, as the exported checkpoint's PyTorch module does."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.command_lines import failed, run, usage_error

from tformer_export.cli import command
from tformer_export.common.checkpoint import save_checkpoint
from tformer_models.forecaster import DecoderForecaster
from tformer_runtime import Model
from tformer_runtime.cli.main import main

ARGUMENTS = {"features": 2, "width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_length": 32}
SERIES = {
    "columns": ["load", "wind"],
    "normalize": {"mean": [50, -1], "scale": [5, 0.1]},
    "horizon": 4,
    "max_context_length": 20,
}
HISTORY = np.random.default_rng(0).standard_normal((12, 2)).cumsum(0) * [5, 0.1] + [50, -1]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the exported file of a checkpoint, and its module."""
    folder = tmp_path_factory.mktemp("forecast")
    torch.manual_seed(0)
    module = DecoderForecaster(**ARGUMENTS)
    torch.nn.init.normal_(module.output.weight, std=0.3)
    factory = "tformer_models.forecaster:DecoderForecaster"
    save_checkpoint(
        module,
        folder / "model.pt",
        factory=factory,
        arguments=ARGUMENTS,
        step_input="x",
        task="forecasting",
        series=SERIES,
    )
    result = CliRunner().invoke(command, [str(folder / "model.pt"), "-o", str(folder / "model.onnx")])
    assert result.exit_code == 0, result.output
    assert "fed back step by step" in result.stderr
    return folder / "model.onnx", module.eval()


@pytest.fixture
def path(exported):
    return exported[0]


@pytest.fixture
def history(tmp_path, monkeypatch):
    """Enter a new folder with two files of histories and return the name of the first."""
    monkeypatch.chdir(tmp_path)
    text = "day,wind,load\n" + "".join(f"{i},{wind!r},{load!r}\n" for i, (load, wind) in enumerate(HISTORY.tolist()))
    (tmp_path / "history.csv").write_text(text)
    np.save(tmp_path / "other.npy", HISTORY[3:9])
    return "history.csv"


def table(text):
    """Return the header and the rows of a CSV table."""
    header, *rows = csv.reader(io.StringIO(text))
    return header, rows


def test_forecast_is_a_table_in_the_units_of_the_data(exported, history):
    path, module = exported
    result = run(path, history, "--horizon", 6)
    assert result.exit_code == 0, result.output
    header, rows = table(result.stdout)
    assert header == ["load", "wind"]
    mean, scale = np.array([50, -1]), np.array([5, 0.1])
    with torch.inference_mode():
        normalized = torch.from_numpy(((HISTORY - mean) / scale).astype(np.float32))[None]
        expected = module.forecast(normalized, 6)[0].numpy() * scale + mean
    np.testing.assert_allclose(np.array(rows, float), expected, rtol=1e-5)
    assert len(table(run(path, history).stdout)[1]) == SERIES["horizon"]


def test_forecasts_of_several_inputs_have_an_input_column(path, history):
    header, rows = table(run(path, history, "other.npy", "--horizon", 3).stdout)
    assert header == ["input", "load", "wind"]
    assert [row[0] for row in rows] == ["history.csv"] * 3 + ["other.npy"] * 3
    actual = Model.load(path, device="cpu").forecast(HISTORY[3:9], 3)
    np.testing.assert_allclose(np.array([row[1:] for row in rows[3:]], np.float32), actual, rtol=1e-5)


def test_json_and_arrays_contain_the_same_forecasts(path, history, tmp_path):
    lines = [json.loads(line) for line in run(path, history, "other.npy", "--json").stdout.splitlines()]
    assert [(line["index"], line["input"], line["columns"]) for line in lines] == [
        (0, "history.csv", ["load", "wind"]),
        (1, "other.npy", ["load", "wind"]),
    ]
    assert run(path, history, "--output-file", "one.npy").exit_code == 0
    np.testing.assert_allclose(np.load("one.npy"), np.float32(lines[0]["forecast"]), rtol=1e-5)
    (tmp_path / "list.txt").write_text("history.csv\nother.npy\n")
    assert run(path, "--input-file", "list.txt", "--output-file", "two.npy", "--workers", 2).exit_code == 0
    np.testing.assert_allclose(np.load("two.npy"), np.float32([line["forecast"] for line in lines]), rtol=1e-5)


def test_history_is_read_from_standard_input(path, history):
    text = Path(history).read_text()
    assert run(path, "-", stdin=text).stdout == run(path, history).stdout


def test_long_history_is_cut_only_with_truncate(path, history):
    np.save("long.npy", np.concatenate([HISTORY, HISTORY]))
    message = failed(run(path, "long.npy"))
    assert message == (
        "input 1: the history has 24 rows and the model reads at most 20: give the last of them, or have it cut "
        "with --truncate (truncate=True)"
    )
    np.save("last.npy", np.concatenate([HISTORY, HISTORY])[-20:])
    assert run(path, "long.npy", "--truncate").stdout == run(path, "last.npy").stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "load\n1\n",
            "input 1: broken.csv has no column 'wind': the model reads load, wind, and the file's first line",
        ),
        ("load,wind\n1,2\n3,four\n", "input 1: broken.csv, line 3: 'four' in column 'wind' is not a number"),
        ("load,wind\n1,2\nnan,3\n", "input 1: row 2 of column 'load' is nan: fill gaps before"),
        ("load,wind\n", "input 1: the history has 0 rows and the model reads 1 at least"),
    ],
)
def test_invalid_history_is_refused_with_its_place(path, history, text, sentence):
    with open("broken.csv", "w") as file:
        file.write(text)
    assert failed(run(path, "broken.csv")).startswith(sentence)


def test_invalid_options_and_files_are_refused(path, history):
    assert failed(run(path, history, "--num-beams", 3)) == (
        "model.onnx forecasts series of numbers (forecasting): it takes no --num-beams"
    )
    assert failed(run(path, history, "--horizon", 40)) == (
        "--horizon must be at most 32, for the model holds 32 steps, not 40"
    )
    assert "whole number" in failed(run(path, history, "--horizon", "soon"))
    assert run(path, history, "--max-memory", "64M").stdout == run(path, history).stdout
    assert "input 1: the request may need" in failed(run(path, history, "--max-memory", 100))
    assert failed(run(path, "1 2", "--ids")).startswith("a series holds numbers, and --ids is for ids")
    assert failed(run(path, history, "--json", "--output-file", "one.npy")).startswith(
        "one.npy is written as one array"
    )
    assert "is not a name of a file: give that of a history" in failed(run(path, "a\0b.csv"))
    assert failed(run(path, "nowhere.csv")) == "input 1: nowhere.csv cannot be read: No such file or directory"


def test_failed_run_is_resumed(path, history, monkeypatch):
    expected = run(path, history, "other.npy", history, "--batch-size", 1).stdout
    with open("list.txt", "w") as file:
        file.write("history.csv\nother.npy\nnowhere.csv\n")
    arguments = (path, "--input-file", "list.txt", "--output-file", "out.csv", "--batch-size", 1)
    failed(run(*arguments))
    with open("list.txt", "w") as file:
        file.write("history.csv\nother.npy\nhistory.csv\n")
    result = run(*arguments, "--resume")
    assert result.exit_code == 0, result.output
    assert Path("out.csv").read_text() == expected


def test_info_describes_the_series(path):
    facts = json.loads(CliRunner().invoke(main, [str(path), "--info", "--json"]).stdout)
    assert facts["task"] == "forecasting"
    assert facts["series"]["columns"] == ["load", "wind"]
    assert facts["series"]["horizon"] == 4
    assert facts["vocabulary"] is None
    assert usage_error(run(path, "a.csv", "--input-file", "b")) == "give INPUT or --input-file, not both"
