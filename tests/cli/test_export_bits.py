"""tformer-export --quantize with a limit of the loss and calibration data writes a file, a report and an image."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import onnx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tformer_export import save_checkpoint
from tformer_runtime import Model

LETTERS = [*"-<>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
INTEGERS = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)


class Plain(nn.Module):
    """A language model without attention, quick to export, with matrices that are large enough for quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(len(LETTERS), 32), nn.Embedding(24, 32)
        self.expand, self.contract, self.out = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, len(LETTERS))

    def forward(self, tgt):
        x = self.embed(tgt) + self.places(torch.arange(tgt.shape[1]))
        return self.out(x + self.contract(torch.relu(self.expand(x))))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "plain_model.py").write_text(
        "from torch import nn\nimport torch\n\nLETTERS = range(39)\n\n\n" + source_code(Plain)
    )
    sys.path.insert(0, str(folder))
    import plain_model

    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="-"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(3)
    save_checkpoint(
        plain_model.Plain(), folder / "plain.pt", factory="plain_model:Plain", arguments={},
        tokenizer=tokenizer.to_str(), special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
        max_length=24,
    )  # fmt: skip
    yield folder / "plain.pt", "--trust", "plain_model"
    sys.path.remove(str(folder))


def source_code(module_class):
    import inspect

    return inspect.getsource(module_class)


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Enter a new folder with a calibration file and return the file's name."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    text = "".join("".join(rng.choices(LETTERS[3:], k=rng.randint(4, 20))) + "\n" for _ in range(120))
    Path("lines.txt").write_text(text)
    return "lines.txt"


def test_mixed_quantization_stays_within_max_degradation(checkpoint, lines, run):
    status, err = run(
        *checkpoint, "-o", "out.onnx", "--quantize", "mixed", "--calibration", lines, "--max-degradation", "4%",
        "--report", "report.json",
    )  # fmt: skip
    assert status == 0, err
    assert sorted(os.listdir()) == ["lines.txt", "out.onnx", "report.json"]
    report = json.loads(Path("report.json").read_text())
    mixture, degradation = report["mixture"], report["degradation"]
    chosen = mixture["frontier"][mixture["chosen"]]
    assert mixture["budget"] == "4.0% of the tokens"
    assert 1 - chosen["quality"]["token_agreement"] <= 0.04
    assert degradation["positions"] == mixture["positions"] > 200
    assert degradation["token_agreement"] == pytest.approx(chosen["quality"]["token_agreement"], abs=0.01)
    assert [tuple(layer["shape"]) for layer in mixture["layers"]] == [(32, 39), (32, 48), (48, 32), (32, 39)]
    assert all(set(layer["divergence"]) >= {"4"} for layer in mixture["layers"][1:])
    assert mixture["layers"][0]["bits"] == 8  # the embedding, too small for 4
    assert "4.0% of the tokens allowed" in err
    assert err.count("of tokens, perplexity ×") == len(mixture["frontier"])
    model = Model.load("out.onnx", "cpu")
    assert model.manifest.quantization == "mixed"
    assert len(model.generate("abc").token_ids) > 0


def test_mixed_quantization_stays_within_max_bits(checkpoint, lines, run):
    options = ("--quantize", "mixed", "--calibration", lines, "--max-bits", "8")
    status, err = run(*checkpoint, "-o", "out.onnx", *options, "--report", "report.json")
    assert status == 0, err
    mixture = json.loads(Path("report.json").read_text())["mixture"]
    assert mixture["budget"] == "8 bits for each weight"
    weights = sum(inner * columns for inner, columns in (layer["shape"] for layer in mixture["layers"]))
    assert 8 * mixture["frontier"][mixture["chosen"]]["size"] / weights <= 8
    assert {8} < {layer["bits"] for layer in mixture["layers"]} <= {4, 6, 8}


def test_int4_beyond_max_degradation_is_refused(checkpoint, lines, refused):
    options = ("--quantize", "int4", "--calibration", lines, "--max-degradation", "0.5%")
    message = refused(*checkpoint, "-o", "out.onnx", *options)
    assert message.startswith("quantisation changes ")
    assert "of the tokens and 0.5% is allowed; no file was written: " in message
    assert "MB" in message


def test_calibration_data_changes_the_integers(checkpoint, lines, run):
    """The integers of 8 and of 4 bits differ with and without calibration data."""
    integers = {}
    for quantization in ("int8", "int4"):
        for data in ((), ("--calibration", lines)):
            assert run(*checkpoint, "-o", "out.onnx", "--quantize", quantization, *data, "--force")[0] == 0
            tensors = onnx.load("out.onnx").graph.initializer
            integers[quantization, data] = [t.raw_data for t in tensors if t.data_type in INTEGERS]
    assert len({tuple(value) for value in integers.values()}) == 4


def test_invalid_calibration_lines_are_refused(checkpoint, lines, refused):
    Path("bad.txt").write_text("abc\nabC\n" + 8 * "abc\n")
    options = (*checkpoint, "-o", "out.onnx", "--quantize", "int4", "--calibration")
    assert refused(*options, "bad.txt").startswith("line 2 of bad.txt: 'C' (character 3 of the input) is not in the")
    assert refused(*options, "none.txt") == "there is no file none.txt to calibrate with"


def test_calibration_without_quantization_is_refused(checkpoint, lines, refused):
    message = refused(*checkpoint, "-o", "out.onnx", "--calibration", lines)
    assert "choose quantization 'int8', 'int4' or 'mixed'" in message


@pytest.mark.parametrize("budget", ["2", "much", "0.5x", "101%"])
def test_invalid_max_degradation_is_a_usage_error(budget, checkpoint, lines, run):
    status, err = run(*checkpoint, "-o", "out.onnx", "--quantize", "int8", "--max-degradation", budget)
    assert status == 2
    assert "such as 1% or 0.01" in err


def test_int8_caches_are_refused_for_the_portable_target_and_without_caches(checkpoint, lines, refused):
    message = refused(*checkpoint, "-o", "out.onnx", "--kv-cache", "int8", "--target", "portable")
    assert message == (
        "caches in int8 need onnxruntime's own operator, as measured on the CPU: leave out either them or the target "
        "portable"
    )
    assert "no cache of this model can be int8" in refused(*checkpoint, "-o", "out.onnx", "--kv-cache", "int8")


def test_static_activation_scales_are_fitted_to_calibration_data(checkpoint, lines, run):
    scales_by_data = {}
    for data in ((), ("--calibration", lines)):
        status, err = run(
            *checkpoint, "-o", "out.onnx", "--quantize", "int8", "--activation-scales", "static", *data, "--force",
            "--report", "report.json",
        )  # fmt: skip
        assert status == 0, err
        report = json.loads(Path("report.json").read_text())
        assert report["activation_scales"] == "static"
        assert report["counts"]["static_scales"] + report["counts"]["row_scales"] == 3
        assert f"{report['counts']['static_scales']} of 3 inputs of products, the others per row" in err
        assert (
            sum(product["static_scale"] for product in report["products"].values())
            == report["counts"]["static_scales"]
            > 0
        )
        model = Model.load("out.onnx", "cpu")
        scalings = [product.scaling for product in model.manifest.stored_products.products.values()]
        scales_by_data[data] = [scaling.fixed_scale for scaling in scalings if scaling is not None]
        assert sum(scale > 0 for scale in scales_by_data[data]) == report["counts"]["static_scales"]
        assert len(model.generate("abc").token_ids) > 0
    assert len({tuple(scales) for scales in scales_by_data.values()}) == 2  # they depend on the calibration data


def test_static_activation_scales_with_mixed_quantization(checkpoint, lines, run):
    options = (
        "--quantize",
        "mixed",
        "--activation-scales",
        "static",
        "--calibration",
        lines,
        "--max-degradation",
        "6%",
    )
    status, err = run(*checkpoint, "-o", "out.onnx", *options, "--report", "report.json")
    assert status == 0, err
    report = json.loads(Path("report.json").read_text())
    chosen = report["mixture"]["frontier"][report["mixture"]["chosen"]]["quality"]
    assert report["degradation"]["token_agreement"] == pytest.approx(chosen["token_agreement"], abs=0.01)
    assert report["counts"]["static_scales"] > 0


def test_static_activation_scales_without_quantization_are_refused(checkpoint, lines, refused):
    message = refused(*checkpoint, "-o", "out.onnx", "--activation-scales", "static")
    assert message == "static activation scales are for quantised products: quantize to int8 or int4 too"
