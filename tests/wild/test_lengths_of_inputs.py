"""Lengths of request inputs: equal ones in the example, and rows that are shorter than a kernel."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tformer_export import export, padding
from tformer_runtime import InputError, Model, ParityError, UnsupportedModelError

WIDTH, IDS, LENGTH = 8, 51, 7
TOLERANCE = 1e-5  # of numbers of about one, which are sums of some ten products


class TwoInputs(nn.Module):
    """x (batch, time, WIDTH) and text (batch, positions) → (batch, time, WIDTH), or a vector for each row."""

    def __init__(self, join):
        super().__init__()
        self.embed, self.read, self.out, self.join = nn.Embedding(IDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), join

    def forward(self, x, text):
        return self.out(self.join(self.read(x), text, self.embed))


def filled(x, text, embed):
    """Cut or fill the text to the length of x, as text of a speech model is."""
    text = F.pad((text + 1)[:, : x.shape[1]], (0, x.shape[1] - text[:, : x.shape[1]].shape[1]))
    return x + embed(text)


def added(x, text, embed):
    return x + embed(text)


def compared(x, text, embed):
    """Compare a batch of pairs, whose lengths are free of each other."""
    return x.amax(1) * embed(text).amax(1)


def row_of(x, text):
    random = np.random.default_rng(x)
    return {"x": random.standard_normal((x, WIDTH)).astype(np.float32), "text": random.integers(0, IDS - 1, text)}


def exported(module, path, x=LENGTH, text=LENGTH, **options):
    torch.manual_seed(0)
    example = {"x": torch.randn(2, x, WIDTH), "text": torch.randint(0, IDS - 1, (2, text))}
    export(module, path, example, force=True, **options)
    return Model.load(path, "cpu")


def made(join):
    torch.manual_seed(0)
    return TwoInputs(join).eval()


@pytest.mark.parametrize(("x", "text"), [(LENGTH, LENGTH), (12, LENGTH), (4, 9)])
def test_lengths_that_are_cut_to_each_other_are_refused_for_any_example(x, text, tmp_path):
    with pytest.raises(UnsupportedModelError, match="forward takes another execution path"):
        exported(made(filled), tmp_path / "model.onnx", x, text)
    assert not list(tmp_path.iterdir())


def test_lengths_that_have_to_be_equal_are_one_length_of_the_file(tmp_path):
    module = made(added)
    model = exported(module, tmp_path / "model.onnx")
    assert len({spec.shape[1] for spec in model.manifest.encode.inputs}) == 1
    for length in (2, 5, 11):
        row = row_of(length, length)
        with torch.no_grad():
            expected = module(*(torch.from_numpy(value)[None] for value in row.values()))[0].numpy()
        np.testing.assert_allclose(next(model.predict([row])), expected, rtol=0, atol=TOLERANCE)
    for row in (row_of(3, 5), row_of(1, 5)):
        with pytest.raises(InputError, match=r"inputs x and text are \d and 5 long, and the model needs them equally"):
            next(model.predict([row]))


def test_lengths_of_a_pair_are_free_of_each_other(tmp_path):
    module = made(compared)
    model = exported(module, tmp_path / "model.onnx")
    assert len({spec.shape[1] for spec in model.manifest.encode.inputs}) == 2
    for row in (row_of(2, 9), row_of(9, 2), row_of(1, 5), row_of(6, 6)):
        with torch.no_grad():
            expected = module(*(torch.from_numpy(value)[None] for value in row.values()))[0].numpy()
        np.testing.assert_allclose(next(model.predict([row])), expected, rtol=0, atol=TOLERANCE)


class Translator(nn.Module):
    """A decoder that attends to an encoder's text with a feature for each of its positions."""

    def __init__(self, joins):
        super().__init__()
        self.embed, self.read, self.joins = nn.Embedding(IDS, WIDTH), nn.Linear(WIDTH, WIDTH), joins
        self.out = nn.Linear(WIDTH, IDS)

    def forward(self, x, text, keep, ids):
        memory = self.joins(self.read(x), text, self.embed)
        states = self.embed(ids)
        return self.out(states + F.scaled_dot_product_attention(states, memory, memory, keep[:, None]))


@pytest.mark.parametrize("join", [filled, added])
def test_request_inputs_of_a_step_model_are_told_apart(join, tmp_path):
    torch.manual_seed(0)
    module, path = Translator(join).eval(), tmp_path / "model.onnx"
    example = {
        "x": torch.randn(2, LENGTH, WIDTH),
        "text": torch.randint(0, IDS - 1, (2, LENGTH)),
        "ids": torch.randint(0, IDS - 1, (2, 5)),
    }
    special = {"bos_token_id": 1, "eos_token_id": 2}
    options = {"special_tokens": special, "max_length": 32, "masks": {"keep": padding("x")}}
    if join is filled:
        with pytest.raises((UnsupportedModelError, ParityError)):
            export(module, path, example, "ids", **options)
        return
    export(module, path, example, "ids", **options)
    with pytest.raises(InputError, match="inputs x and text are 4 and 6 long"):
        Model.load(path, "cpu").generate(row_of(4, 6), max_new_tokens=2)


class Window(nn.Module):
    """ids (batch, time) → a vector for each row, by a layer that needs some positions."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer = nn.Embedding(IDS, WIDTH), layer

    def forward(self, ids):
        return self.layer(self.embed(ids).transpose(1, 2)).amax(2)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LAYERS = {
    "average of a window": (nn.AvgPool1d(4), 4),
    "greatest of a window with a stride": (nn.MaxPool1d(3, 2), 3),
    "convolution with a dilation": (nn.Conv1d(WIDTH, WIDTH, 3, dilation=3), 7),
    "unfolded windows": (Call(lambda x: x.unfold(2, 3, 2).mean(-1)), 3),
    "reflected ends": (Call(lambda x: F.pad(x, (3, 3), mode="reflect")), 4),
    "cut ends": (Call(lambda x: x[:, :, 1:-2]), 4),
    "same length": (nn.Conv1d(WIDTH, WIDTH, 5, padding=2), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_row_that_is_shorter_than_a_window_is_refused_where_torch_raises(name, tmp_path):
    layer, least = LAYERS[name]
    torch.manual_seed(0)
    module, path = Window(layer).eval(), tmp_path / "model.onnx"
    export(module, path, {"ids": torch.randint(0, IDS - 1, (2, 12))}, max_length=64)
    model = Model.load(path, "cpu")
    for length in range(1, 10):
        ids = np.arange(length)
        if length < least:
            with pytest.raises(Exception, match=r"."), torch.no_grad():  # errors of PyTorch have no common base
                module(torch.from_numpy(ids)[None])
            sentence = f"input ids is {length} long and the model needs at least {least}"
            with pytest.raises(InputError, match=re.escape(sentence)):
                next(model.predict([ids]))
        else:
            with torch.no_grad():
                expected = module(torch.from_numpy(ids)[None])[0].numpy()
            np.testing.assert_allclose(next(model.predict([ids])), expected, rtol=0, atol=TOLERANCE)


def test_image_that_is_lower_than_a_patch_is_refused(tmp_path):
    torch.manual_seed(0)
    module, path = nn.Sequential(nn.Conv2d(3, WIDTH, (4, 8), (2, 8)), nn.AdaptiveAvgPool2d(1)), tmp_path / "model.onnx"
    export(module.eval(), path, {"input": torch.randn(2, 3, 12, 8)}, axes={"input": (0, 2)})
    model = Model.load(path, "cpu")
    rows = np.random.default_rng(0).standard_normal((6, 3, 8)).astype(np.float32)  # the free axis comes first
    expected = module(torch.from_numpy(rows).transpose(0, 1)[None])[0].detach().numpy()
    np.testing.assert_allclose(next(model.predict([rows])), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(InputError, match="input input is 3 long and the model needs at least 4"):
        next(model.predict([rows[:3]]))
