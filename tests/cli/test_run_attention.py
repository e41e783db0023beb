"""Attention weights match PyTorch's and are drawn as images; models and calls without them are refused."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from support.command_lines import failed, run
from support.toy_tasks import write
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tformer_export import ExtraOutputs, export, padding
from tformer_runtime import InputError, Model, OptionError, UnsupportedCallError
from tformer_runtime.cli.heatmaps import attention_maps

WORDS = {word: i for i, word in enumerate(["[PAD]", "a", "good", "bad", "day", "$b", "night"])}


class Encoder(nn.Module):
    """An encoder of WORDS. heads: the number of heads of each layer."""

    def __init__(self, heads=(2, 2), width=8):
        super().__init__()
        self.embed, self.head, self.heads = nn.Embedding(len(WORDS), width), nn.Linear(width, 3), heads
        self.packed = nn.ModuleList(nn.Linear(width, 3 * width) for _ in heads)

    def forward(self, ids, keep):
        x = self.embed(ids)
        for packed, heads in zip(self.packed, self.heads, strict=True):
            q, k, v = packed(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, keep[:, None, None]).transpose(1, 2).flatten(2)
        return self.head(x[:, 0])


class Reader(Encoder):
    """An encoder with the scores of answers as two named outputs."""

    def forward(self, ids, keep):
        x = self.embed(ids)
        for packed, heads in zip(self.packed, self.heads, strict=True):
            q, k, v = packed(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, keep[:, None, None]).transpose(1, 2).flatten(2)
        return dict(zip(("start", "end"), self.head(x).unbind(-1)[:2], strict=True))


def exported(module, out, **options):
    torch.manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    example = {"ids": torch.tensor([[3, 4, 5], [2, 3, 4]])}
    options = {"task": "text-classification", "extra_outputs": ExtraOutputs(attentions=True), **options}
    return export(module, out, example, masks={"keep": padding("ids")}, tokenizer=words.to_str(), **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("attention") / "model.onnx"
    exported(Encoder(), out)
    return out


def pixels_of(path):
    """Return the pixels (height, width, red-green-blue) of a PNG file."""
    from matplotlib.image import imread

    return imread(path)[:, :, :3]


def test_attentions_match_the_module(path):
    module = Encoder()
    torch.manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    model, expected = Model.load(path, "cpu"), []
    with torch.no_grad():
        x = module.embed(torch.tensor([[1, 2, 4]]))
        for packed in module.packed:
            q, k, v = packed(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
            expected.append(weights[0].numpy())
            x = x + (weights @ v).transpose(1, 2).flatten(2)
    actual, tokens = model.attentions("a good day")
    np.testing.assert_allclose(actual, np.stack(expected), atol=1e-5)
    assert tokens == ["a", "good", "day"]


def test_attentions_write_one_image_per_input_and_unchanged_results(path, tmp_path):
    texts = ["a good day", "$b a bad night a day"]
    result = run(path, *texts, "--attentions", tmp_path / "out.png")
    assert result.stdout == run(path, *texts).stdout
    assert sorted(os.listdir(tmp_path)) == ["out-1.png", "out-2.png"]
    first, second = (pixels_of(tmp_path / name).shape for name in ("out-1.png", "out-2.png"))
    assert second[0] > first[0]
    assert second[1] > first[1]
    assert run(path, texts[0], "--attentions", tmp_path / "one.pdf").exit_code == 0
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")


def test_attention_map_cell_is_as_dark_as_its_weight_in_its_layer_and_head(tmp_path):
    weights = np.zeros((2, 3, 5, 5), np.float32)
    weights[1, 0] = np.eye(5)
    attention_maps(tmp_path / "out.png", weights, list("abcde"))
    image = pixels_of(tmp_path / "out.png")
    gray = np.abs(image - 0.8).max(-1) < 0.01  # the lines between squares
    dark = np.abs(image - np.array([8, 48, 107]) / 255).max(-1) < 0.02
    dark[:, image.shape[1] * 7 // 10 :] = False  # without the colour scale on the right
    across, down = np.flatnonzero(gray.mean(1) > 0.3), np.flatnonzero(gray.mean(0) > 0.3)
    rows, columns = np.nonzero(dark)
    assert rows.min() > across.max()  # in the second layer
    assert columns.max() < down.min()  # in the first head
    assert np.corrcoef(rows, columns)[0, 1] > 0.95
    assert 5 * 8**2 < len(rows) < 5 * 25**2


def test_invalid_uses_of_attentions_are_refused(path, tmp_path):
    out, plain = tmp_path / "out.png", write(tmp_path / "plain.onnx", "vector", task="feature-extraction")
    assert failed(run(plain, "a", "--attentions", out)) == (
        "the file holds no attention weights to draw: export the model with --attentions "
        "(ExtraOutputs(attentions=True))"
    )
    with pytest.raises(
        UnsupportedCallError, match=r"plain.onnx holds no attention weights: export the model with --attentions"
    ):
        Model.load(plain, "cpu").attentions("a")
    assert failed(run(path, "a", "--attentions", "a")) == (
        "--attentions can be drawn into a file of the kind .png, .pdf, .svg, not 'a'"
    )
    resumed = run(path, "a", "--attentions", out, "--resume", "--output-file", tmp_path / "x")
    assert failed(resumed) == "--resume cannot continue images: leave out --attentions"
    out.write_text("old")
    assert failed(run(path, "a", "--attentions", out)) == f"{out} exists already: give --force to overwrite it"
    assert failed(run(plain, "a", "--attentions", out, "--similarity")).startswith(
        "--attentions and --similarity exclude each other"
    )


def test_attentions_of_inputs_in_several_windows_are_refused(tmp_path):
    """The input is refused before the model runs. Pairs and dicts are read as by answer()."""
    path = tmp_path / "x.onnx"
    exported(Reader((2,)), path, task="question-answering", output=["start", "end"])
    model, pair = Model.load(path, "cpu"), ("a good", "day night a bad")
    weights, tokens = model.attentions({"question": pair[0], "context": pair[1]})
    assert tokens == " ".join(pair).split()
    np.testing.assert_array_equal(weights, model.attentions(pair)[0])
    with pytest.raises(InputError, match="the context is read in 2 windows of 4 tokens, but attention weights are"):
        model.attentions(pair, max_seq_len=4, doc_stride=0)
    lines = ["a\tgood day", "\t".join(pair)]
    (tmp_path / "drawn").mkdir()
    actual = run(path, *lines, "--attentions", tmp_path / "drawn" / "out.png", "--max-seq-len", 4, "--doc-stride", 0)
    assert failed(actual, before=1).startswith("input 2: the context is read in 2 windows of 4 tokens")
    assert actual.stdout == run(path, lines[0]).stdout
    assert os.listdir(tmp_path / "drawn") == ["out-1.png"]  # of the input before the refused one


def test_models_without_common_attention_shape_raise_option_error(tmp_path):
    with pytest.raises(OptionError, match=r"the layers of the model differ: 2 heads over .* and 4 heads over"):
        exported(Encoder((2, 4)), tmp_path / "x.onnx")
    with pytest.raises(OptionError, match="no attention was recognised in the model, so that the file"):
        exported(Encoder(()), tmp_path / "x.onnx")

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

        def forward(self, ids):
            x = self.embed(ids)[:, None]
            return self.out(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])

    with pytest.raises(OptionError, match="attentions are outputs of a single-pass model, and this one"):
        export(
            Step(),
            tmp_path / "x.onnx",
            {"ids": torch.tensor([[3, 4, 5], [2, 3, 4]])},
            "ids",
            extra_outputs=ExtraOutputs(attentions=True),
        )
