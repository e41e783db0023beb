"""Alignments on the command line: a file is exported with them, and tformer-run draws them and puts them into JSON."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from support.command_lines import failed, misused, run
from support.toy_models import Toy

import tformer_export.cli
from tformer_runtime import Model, OptionError
from tformer_runtime.cli.heatmaps import heat_map

SHORT = ["--max-new-tokens", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(Toy(seed=1, extras=True).write(tmp_path_factory.mktemp("run") / "toy.onnx"))


def picture(path):
    """(height, width, red-green-blue) of a PNG file."""
    from matplotlib.image import imread

    return imread(path)[:, :, :3]


def test_one_input_is_one_picture_and_the_results_are_as_ever(path, tmp_path):
    drawn = run(path, "hello", *SHORT, "--cross-attentions", tmp_path / "out.png")
    assert drawn.stdout == run(path, "hello", *SHORT).stdout
    assert os.listdir(tmp_path) == ["out.png"]
    assert min(picture(tmp_path / "out.png").shape[:2]) > 100


@pytest.mark.parametrize("given", ["arguments", "lines"])
def test_several_inputs_are_numbered_pictures(path, tmp_path, given):
    words = ["hello", "a", "zebra"]
    arguments = [*words] if given == "arguments" else []
    result = run(path, *arguments, *SHORT, "--cross-attentions", tmp_path / "out.png", stdin="\n".join(words))
    assert len(result.stdout.splitlines()) == 3
    assert sorted(os.listdir(tmp_path)) == ["out-1.png", "out-2.png", "out-3.png"]
    shapes = [picture(tmp_path / f"out-{i}.png").shape for i in (1, 2, 3)]
    assert shapes[0][1] > shapes[1][1]  # a column for each letter


def test_a_cell_is_as_dark_as_its_weight(tmp_path):
    labels = ["$b", " ", *"abcdefghijkl"]
    heat_map(tmp_path / "out.png", np.eye(14, dtype=np.float32), labels, labels)
    blue = picture(tmp_path / "out.png")
    dark = np.abs(blue - np.array([8, 48, 107]) / 255).max(-1) < 0.02  # the dark end of the scale
    rows, columns = np.nonzero(dark[:, : dark.shape[1] * 7 // 10])  # without the scale, which is beside the cells
    # One cell in each row, the first at the top and the left: cells of some 30 pixels on a side.
    assert np.corrcoef(rows, columns)[0, 1] > 0.99
    assert 14 * 20**2 < len(rows) < 14 * 40**2


def test_json_holds_the_weights(path, tmp_path):
    words = ["hello", "abc"]
    result = run(
        path, *words, *SHORT, "--json", "--cross-attentions", "-", "--num-beams", 3, "--num-return-sequences", 2
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    model = Model.load(path, "cpu")
    assert [(line["index"], line["rank"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for line in lines:
        found = np.array(line["cross_attentions"])
        expected = model.align(words[line["index"]], line["token_ids"])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert "hidden_states" not in line
    assert "cross_attentions" not in json.loads(run(path, "hello", *SHORT, "--json").stdout)


def test_json_holds_hidden_states(path):
    line = json.loads(run(path, "hello", *SHORT, "--json", "--hidden-states").stdout)
    expected = Model.load(path, "cpu").generate("hello", max_new_tokens=6, hidden_states=True).hidden_states
    assert set(line["hidden_states"]) == set(expected) == {"last", "source"}
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(line["hidden_states"][name]), value, rtol=1e-4, atol=1e-4)


def test_a_picture_that_is_there_is_kept(path, tmp_path):
    out = tmp_path / "out.png"
    out.write_text("old")
    assert failed(run(path, "hello", *SHORT, "--cross-attentions", out)) == (
        f"{out} exists already: give --force to overwrite it"
    )
    assert out.read_text() == "old"
    assert run(path, "hello", *SHORT, "--cross-attentions", out, "--force").exit_code == 0
    assert picture(out).size


def test_what_cannot_be_asked_for(path, tmp_path):
    plain, out = Toy().write(tmp_path / "plain.onnx"), tmp_path / "out.png"
    assert failed(run(plain, "hello", *SHORT, "--cross-attentions", out)) == (
        f"{plain} holds no cross-attention weights: export the model with --cross-attentions "
        f"(ExtraOutputs(cross_attentions=True))"
    )
    assert failed(run(path, "hello", "--cross-attentions", "hello"), 2) == (
        "--cross-attentions can be drawn into a file of the kind .png, .pdf, .svg, not 'hello'"
    )
    assert "--cross-attentions - adds to --json" in misused(run(path, "hello", "--cross-attentions", "-"))
    assert "--hidden-states adds to --json" in misused(run(path, "hello", "--hidden-states"))
    assert "not with --cross-attentions" in misused(run(path, "hello", "--stream", "--cross-attentions", out))
    resumed = run(path, "hello", "--cross-attentions", out, "--resume", "--output-file", tmp_path / "out")
    assert misused(resumed) == "--resume goes on with results alone: not with --cross-attentions OUT.png"
    missing = tmp_path / "nowhere" / "out.png"
    result = run(path, "hello", *SHORT, "--cross-attentions", missing)
    assert result.stderr == f"tformer-run: {missing} cannot be written: No such file or directory\n"
    results = tmp_path / "results"
    several = run(path, "hello", "a", *SHORT, "--cross-attentions", missing, "--output-file", results)
    assert "nowhere/out-1.png cannot be written" in failed(several)
    assert not list(tmp_path.glob("results*"))  # pictures are not resumed, so nothing is kept


def test_a_missing_matplotlib_is_one_sentence(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert failed(run(path, "hello", *SHORT, "--cross-attentions", tmp_path / "out.png")) == (
        "--cross-attentions needs matplotlib: pip install 'tformer[plot]'"
    )


def test_layers_on_the_command_line():
    layers = tformer_export.cli._layers
    assert layers("") is True
    assert layers("last") == "last"
    assert layers("2,3:0") == [2, (3, 0)]
    with pytest.raises(OptionError, match=r"not 'model\.pt'; put SOURCE before it"):
        layers("model.pt")


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


def test_export_and_run(tmp_path, monkeypatch, capsys):
    """From a module to a picture, through both programs."""
    (tmp_path / "looking.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    made = tmp_path / "model.onnx"
    command = [
        "tformer-export",
        "looking:make",
        "--step-input",
        "tgt",
        "--cross-attentions",
        "0:0",
        "--hidden-states",
        "embed",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "-o", str(made)])
    tformer_export.cli.main()
    table = capsys.readouterr().err
    assert [line.split()[:2] for line in table.splitlines() if "max |Δ| " in line] == [
        ["hidden_states.embed", "max"],
        ["cross_attentions", "max"],
    ]
    result = run(made, "3 4 5", "--ids", *SHORT, "--cross-attentions", tmp_path / "out.png")
    assert result.exit_code == 0
    assert picture(tmp_path / "out.png").size
    info = json.loads(run(made, "--info", "--json").stdout)
    assert info["extra_outputs"] == ["hidden_states.embed", "cross_attentions"]
