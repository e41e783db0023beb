"""tformer-run draws cross-attention weights and writes them as JSON, as Model.align returns them."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from support.command_lines import failed, run, usage_error
from support.toy_models import Toy

import tformer_export.cli
from tformer_runtime import Model, ParityError
from tformer_runtime.cli.heatmaps import heat_map

SHORT = ["--max-new-tokens", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(Toy(seed=1, extras=True).write(tmp_path_factory.mktemp("run") / "toy.onnx"))


def pixels_of(path):
    """Return the pixels (height, width, red-green-blue) of a PNG file."""
    from matplotlib.image import imread

    return imread(path)[:, :, :3]


def test_one_input_writes_one_image_and_unchanged_results(path, tmp_path):
    result = run(path, "hello", *SHORT, "--cross-attentions", tmp_path / "out.png")
    assert result.stdout == run(path, "hello", *SHORT).stdout
    assert os.listdir(tmp_path) == ["out.png"]
    assert min(pixels_of(tmp_path / "out.png").shape[:2]) > 100


@pytest.mark.parametrize("input_source", ["arguments", "lines"])
def test_several_inputs_write_numbered_images(path, tmp_path, input_source):
    words = ["hello", "a", "zebra"]
    arguments = [*words] if input_source == "arguments" else []
    result = run(path, *arguments, *SHORT, "--cross-attentions", tmp_path / "out.png", stdin="\n".join(words))
    assert len(result.stdout.splitlines()) == 3
    assert sorted(os.listdir(tmp_path)) == ["out-1.png", "out-2.png", "out-3.png"]
    shapes = [pixels_of(tmp_path / f"out-{i}.png").shape for i in (1, 2, 3)]
    assert shapes[0][1] > shapes[1][1]  # one column per letter


def test_heat_map_cell_is_as_dark_as_its_weight(tmp_path):
    labels = ["$b", " ", *"abcdefghijkl"]
    heat_map(tmp_path / "out.png", np.eye(14, dtype=np.float32), labels, labels)
    pixels = pixels_of(tmp_path / "out.png")
    is_dark = np.abs(pixels - np.array([8, 48, 107]) / 255).max(-1) < 0.02  # the dark end of the scale
    rows, columns = np.nonzero(is_dark[:, : is_dark.shape[1] * 7 // 10])  # without the colour scale on the right
    # Each row has one dark cell, on the diagonal from the top left. A cell has some 30 × 30 pixels.
    assert np.corrcoef(rows, columns)[0, 1] > 0.99
    assert 14 * 20**2 < len(rows) < 14 * 40**2


def test_json_contains_the_cross_attentions_of_align(path, tmp_path):
    words = ["hello", "abc"]
    result = run(
        path, *words, *SHORT, "--json", "--cross-attentions", "-", "--num-beams", 3, "--num-return-sequences", 2
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    model = Model.load(path, "cpu")
    assert [(line["index"], line["rank"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for line in lines:
        actual = np.array(line["cross_attentions"])
        expected = model.align(words[line["index"]], line["token_ids"])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
        assert "hidden_states" not in line
    assert "cross_attentions" not in json.loads(run(path, "hello", *SHORT, "--json").stdout)


def test_json_contains_hidden_states(path):
    line = json.loads(run(path, "hello", *SHORT, "--json", "--hidden-states").stdout)
    expected = Model.load(path, "cpu").generate("hello", max_new_tokens=6, hidden_states=True).hidden_states
    assert set(line["hidden_states"]) == set(expected) == {"last", "source"}
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(line["hidden_states"][name]), value, rtol=1e-4, atol=1e-4)


def test_existing_image_is_overwritten_only_with_force(path, tmp_path):
    out = tmp_path / "out.png"
    out.write_text("old")
    assert failed(run(path, "hello", *SHORT, "--cross-attentions", out)) == (
        f"{out} exists already: give --force to overwrite it"
    )
    assert out.read_text() == "old"
    assert run(path, "hello", *SHORT, "--cross-attentions", out, "--force").exit_code == 0
    assert pixels_of(out).size


def test_invalid_uses_of_cross_attentions_are_refused(path, tmp_path):
    plain, out = Toy().write(tmp_path / "plain.onnx"), tmp_path / "out.png"
    assert failed(run(plain, "hello", *SHORT, "--cross-attentions", out)) == (
        f"{plain} holds no cross-attention weights: export the model with --cross-attentions "
        f"(ExtraOutputs(cross_attentions=True))"
    )
    assert failed(run(path, "hello", "--cross-attentions", "hello")) == (
        "--cross-attentions can be drawn into a file of the kind .png, .pdf, .svg, not 'hello'"
    )
    assert "--cross-attentions - needs --json" in usage_error(run(path, "hello", "--cross-attentions", "-"))
    assert "--hidden-states needs --json" in usage_error(run(path, "hello", "--hidden-states"))
    assert "not with --cross-attentions" in usage_error(run(path, "hello", "--stream", "--cross-attentions", out))
    resumed = run(path, "hello", "--cross-attentions", out, "--resume", "--output-file", tmp_path / "out")
    assert usage_error(resumed) == "--resume cannot continue images: not with --cross-attentions OUT.png"
    missing = tmp_path / "nowhere" / "out.png"
    result = run(path, "hello", *SHORT, "--cross-attentions", missing)
    assert result.stderr == f"tformer-run: {missing} cannot be written: No such file or directory\n"
    results = tmp_path / "results"
    several = run(path, "hello", "a", *SHORT, "--cross-attentions", missing, "--output-file", results)
    assert "nowhere/out-1.png cannot be written" in failed(several)
    assert not list(tmp_path.glob("results*"))  # a run with images cannot resume, so that no partial file stays


def test_missing_matplotlib_is_refused_in_one_sentence(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert failed(run(path, "hello", *SHORT, "--cross-attentions", tmp_path / "out.png")) == (
        "--cross-attentions needs matplotlib: pip install 'tformer[plot]'"
    )


MODULE = """
import torch
from torch import nn


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.embed, self.out = nn.Embedding(12, 8), nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, src, tgt):
        x, y = self.embed(tgt).unsqueeze(1), self.read(src).unsqueeze(1)
        scores = (x @ y.transpose(2, 3)).masked_fill((src == 0)[:, None, None], -torch.inf)
        return self.out((scores.softmax(-1) @ y).squeeze(1))


def make():
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Looking(), {n: torch.tensor([[3, 4, 5], [6, 7, 8]]) for n in ("src", "tgt")}, {"special_tokens": special}
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Return the name of a factory of an encoder-decoder that tformer-export can import."""
    (tmp_path / "looking.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "looking:make"
    sys.modules.pop("looking", None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cross-attentions", ""], True),
        (["--cross-attentions"], True),
        (["--cross-attentions", "last"], "last"),
        (["--cross-attentions", "2,3:0"], [2, (3, 0)]),
    ],
)
def test_cross_attentions_flag_selects_layers_and_heads(factory, tmp_path, monkeypatch, arguments, expected):
    selections = []

    def record(source, path, options, *_):
        selections.append(options.extra_outputs.cross_attentions)
        raise ParityError("no file")

    monkeypatch.setattr("tformer_export.api.export_source", record)
    source = [factory, "-o", str(tmp_path / "model.onnx")]
    result = CliRunner().invoke(tformer_export.cli.command, [*source, "--step-input", "tgt", *arguments])
    assert (result.exit_code, result.stderr) == (1, "tformer-export: no file\n")
    assert selections == [expected]


def test_invalid_layers_are_refused():
    result = CliRunner().invoke(tformer_export.cli.command, ["--cross-attentions", "model.pt", "looking:make"])
    assert result.exit_code == 1
    assert "not 'model.pt'; put SOURCE before it" in result.stderr


def test_exported_cross_attentions_are_drawn(factory, tmp_path, monkeypatch, capsys):
    """Both programs, from a module to an image."""
    exported_file = tmp_path / "model.onnx"
    command = ["tformer-export", factory, "--step-input", "tgt", "--cross-attentions", "0:0"]
    command += ["--hidden-states", "embed"]
    monkeypatch.setattr(sys, "argv", [*command, "-o", str(exported_file)])
    with pytest.raises(SystemExit, match=r"^0$"):
        tformer_export.cli.main()
    table = capsys.readouterr().err
    assert [line.split()[:2] for line in table.splitlines() if "max |Δ| " in line] == [
        ["hidden_states.embed", "max"],
        ["cross_attentions", "max"],
    ]
    result = run(exported_file, "3 4 5", "--ids", *SHORT, "--cross-attentions", tmp_path / "out.png")
    assert result.exit_code == 0
    assert pixels_of(tmp_path / "out.png").size
    info = json.loads(run(exported_file, "--info", "--json").stdout)
    assert info["extra_outputs"] == ["hidden_states.embed", "cross_attentions"]
