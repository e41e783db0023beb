"""Weights of three axes, as of experts, are quantised in every form of file, and the report says how many are not."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from tformer_export import Quantization, export
from tformer_export.passes import unstack_products
from tformer_runtime import Model
from tformer_runtime.cli.main import main

WIDTH, INNER, EXPERTS, VOCABULARY = 32, 48, 4, 50
EXAMPLE = {"ids": torch.tensor([[3, 4, 5]])}


class Experts(nn.Module):
    """Experts that all compute each position; one further matrix is chosen for each position by data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)
        self.chosen = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        weights = self.gate(x).softmax(-1)
        rows = x.reshape(-1, WIDTH).repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        y = torch.bmm(torch.bmm(rows, self.up).relu(), self.down)
        y = (y * weights.reshape(-1, EXPERTS).t()[..., None]).sum(0).view(x.shape)
        return self.head(x + y + torch.einsum("btk,btkn->btn", x, self.chosen[weights.argmax(-1)]))


OF_STACKS = EXPERTS * WIDTH * (2 * INNER + WIDTH)
ALL = OF_STACKS + 2 * VOCABULARY * WIDTH + WIDTH * EXPERTS + EXPERTS + VOCABULARY


def floats(path):
    """Return the shapes of the float constants with two axes or more that stand for weights, largest first."""
    constants = []
    pending = [onnx.load(path).graph]
    for graph in pending:
        constants += graph.initializer
        pending += [attribute.g for node in graph.node for attribute in node.attribute if attribute.g.node]
    shapes = [tuple(c.dims) for c in constants if c.data_type == onnx.TensorProto.FLOAT and "scale" not in c.name]
    return sorted((shape for shape in shapes if len(shape) > 1), key=np.prod, reverse=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("stacks"), {}
    random, lines = np.random.default_rng(0), folder / "lines.jsonl"
    lengths = [5, 60, 7, 9, 12, 8, 20, 11, 40]  # two are beyond the limit of 32
    lines.write_text("".join(json.dumps(random.integers(0, VOCABULARY, n).tolist()) + "\n" for n in lengths))

    def make(quantization, target="cpu"):
        if (quantization, target) not in files:
            path = folder / f"{quantization}-{target}.onnx"
            form = Quantization("int4", calibration=lines) if quantization == "int4" else quantization
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(unstack_products, "MIN_OWN_VALUES", WIDTH * INNER)  # so that small experts do for a test
                report = export(
                    Experts().eval(), path, EXAMPLE, step_input="ids", max_length=32, quantization=form, target=target
                )
            files[quantization, target] = path, report
        return files[quantization, target]

    return make


@pytest.mark.parametrize(
    ("quantization", "target", "bits"),
    [("int8", "cpu", {"8"}), ("int4", "portable", {"4", "8"}), ("mixed", "cpu", None)],
)
def test_stacks_are_quantised(exported, quantization, target, bits):
    path, report = exported(quantization, target)
    counts = report.weight_bits
    assert sum(counts.values()) == ALL
    assert counts["32"] == WIDTH * EXPERTS + EXPERTS + VOCABULARY  # the gate and the biases, which are small
    assert bits is None or set(counts) == {*bits, "32"}
    assert floats(path) == [(WIDTH, EXPERTS)]
    assert report.degradation.token_agreement > 0.8
    assert report.degradation.row_difference == 0
    tokens = np.array([[3, 4, 5, 9], [7, 7, 1, 2]])
    engine = Model.load(path, device="cpu").engine
    together = engine.step(engine.start(None, 2), tokens, logit_positions="all").copy()
    with torch.no_grad():
        expected = Experts().eval()(torch.from_numpy(tokens)).numpy()
    allowed = 0.02 if quantization == "int8" else 0.2  # of the range
    assert np.abs(together - expected).max() < allowed * np.ptp(expected)
    for row in range(2):
        alone = engine.step(engine.start(None, 1), tokens[row : row + 1], logit_positions="all")
        np.testing.assert_array_equal(alone[0], together[row])


def test_file_for_the_web_has_stacks_in_integers_but_for_lookups(exported):
    path, report = exported("int8", "web")
    assert floats(path)[0] == (EXPERTS, WIDTH, WIDTH)  # WebGPU looks up floats alone
    assert report.weight_bits["8"] == EXPERTS * WIDTH * 2 * INNER + 2 * VOCABULARY * WIDTH
    assert report.degradation.token_agreement > 0.9


def test_report_and_file_say_which_share_has_how_many_bits(exported, tmp_path):
    path, report = exported("int8")
    text = f"{report.weight_bits['8'] / ALL:.1%} 8 bits, {report.weight_bits['32'] / ALL:.1%} 32 bits"
    assert dict(report.rows())["weights"] == text
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["weight_bits"] == report.weight_bits
    assert Model.load(path, device="cpu").info()["weight_bits"] == report.weight_bits
    assert f"weight bits: {text}" in CliRunner().invoke(main, [str(path), "--info"]).output.splitlines()


def test_report_names_the_kernels_of_the_speed_and_the_cause_of_the_length(exported):
    path, report = exported("int8")
    info = Model.load(path, device="cpu").info()
    kernels = info["kernels"] or f"onnxruntime's operators ({info['no_kernels']})"
    assert report.degradation.kernels == kernels
    assert f"one row, with {kernels}" in dict(report.rows())["speed"]
    assert dict(report.rows())["maximum length"] == "32, as asked (--max-length)"
    assert "max length: 32, as asked (--max-length)" in CliRunner().invoke(main, [str(path), "--info"]).output


def test_report_says_how_many_lines_of_calibration_were_cut(exported):
    _, report = exported("int4", "portable")
    assert dict(report.rows())["calibration"] == "9 lines, 2 of them cut to the model's limit"
    assert report.to_dict()["calibration"] == {"count": 9, "cut": 2, "begin_tokens": ()}


def test_unquantised_file_says_so(tmp_path):
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    report = export(Small().eval(), tmp_path / "small.onnx", EXAMPLE, step_input="ids")
    assert dict(report.rows())["weights"] == "100.0% 32 bits"
    default = "512, the default for a model that states no limit: --max-length takes more"
    assert dict(report.rows())["maximum length"] == default
