"""Models of which one input may be no longer than another: the file takes the lengths that PyTorch takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tformer_export import export
from tformer_runtime import Model
from tformer_runtime.base.errors import InputError, UnsupportedModelError

WIDTH = 8


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b):
        return self.function(self.layer(a), b)


class Swapped(Call):
    def forward(self, b, a):
        return self.function(self.layer(a), b)


def checked(a, b):
    if a.shape[1] > b.shape[1]:
        raise ValueError("a is longer than b")
    return a.mean(1) + b.mean(1)


def filled(a, b):
    return torch.cat([a, a.new_zeros(a.shape[0], b.shape[1] - a.shape[1], WIDTH)], 1) + b


FUNCTIONS = {"raise": checked, "cut": lambda a, b: a + b[:, : a.shape[1]], "fill": filled}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("length", [7, 15])
@pytest.mark.parametrize("module_class", [Call, Swapped])
def test_file_takes_an_input_that_is_no_longer_than_another(function, length, module_class, tmp_path):
    torch.manual_seed(0)
    module = module_class(FUNCTIONS[function]).eval()
    names = module.forward.__code__.co_varnames[1:3]
    example = {name: torch.randn(2, {"a": 7, "b": length}[name], WIDTH) for name in names}
    export(module, tmp_path / "model.onnx", example=example)
    model = Model.load(tmp_path / "model.onnx", device="cpu")
    random = np.random.default_rng(0)

    def row(**lengths):
        return {name: random.standard_normal((lengths[name], WIDTH)).astype(np.float32) for name in names}

    for a, b in ((1, 1), (3, 9), (9, 9), (6, 200)):
        values = row(a=a, b=b)
        with torch.no_grad():
            expected = module(*(torch.from_numpy(values[name])[None] for name in names))[0]
        np.testing.assert_allclose(next(iter(model.predict([values]))), expected, atol=1e-5)
    with pytest.raises(InputError, match="the inputs a and b are 9 and 8 long, and the model needs a to be no longer"):
        next(iter(model.predict([row(a=9, b=8)])))


@pytest.mark.parametrize(
    ("function", "length"),
    [(lambda a, b: a + b[:, a.shape[1] : 2 * a.shape[1]], 15), (lambda a, b: F.pad(a, (0, 0, 1, 0)) + b, 8)],
)
def test_other_relation_of_lengths_is_refused_in_words(function, length, tmp_path):
    example = {"a": torch.randn(2, 7, WIDTH), "b": torch.randn(2, length, WIDTH)}
    with pytest.raises(UnsupportedModelError, match="a file holds no other relation of their lengths, so give them"):
        export(Call(function).eval(), tmp_path / "model.onnx", example=example)
