"""A Gelu that is spelled out becomes one operator with PyTorch's results, and any other formula stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
from support.torch_graphs import assert_results_of_torch, graph_of, kinds
from transformers.activations import ACT2FN

from tformer_export.passes import gelu, remove_unused

C = math.sqrt(2 / math.pi)
# Of the results below 4: products of at most 10 factors or terms, each rounded, in two ways
TOLERANCE = 4 * 2 * 10 * 2.0**-24

TANH = {
    "transformers": ACT2FN["gelu_new"],
    "nanoGPT": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "products": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x * x * x))),
    "x factored out": lambda x: x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "probability first": lambda x: x * (0.5 * (torch.tanh(C * (x + 0.044715 * x**3)) + 1)),
    "half at the end": lambda x: (1 + torch.tanh((0.044715 * (x * x * x) + x) * C)) * x * 0.5,
    "half by division": lambda x: x * (1 + torch.tanh(C * x + C * 0.044715 * x**3)) / 2,
    "square": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x * x**2))),
}
ERF = {
    "transformers": ACT2FN["gelu_python"],
    "division": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "product": lambda x: 0.5 * (1.0 + torch.erf(x * 0.7071067811865475)) * x,
    "doubled": lambda x: x / 2 * (torch.erf(x * math.sqrt(0.5)) + 1),
}
OTHERS = {
    "another cubic factor": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.04472 * x**3))),
    "another scale": lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
    "no half": lambda x: x * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "another sum": lambda x: 0.5 * x * (2 + torch.tanh(C * (x + 0.044715 * x**3))),
    "a difference": lambda x: 0.5 * x * (1 - torch.tanh(C * (x + 0.044715 * x**3))),
    "a fourth power": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**4))),
    "a power that is not a whole number": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3.5))),
    "a square more": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3 + 0.1 * x**2))),
    "another factor": lambda x: 0.5 * (x + 1) * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "another value": lambda x: 0.5 * x.flip(-1) * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "a root cut off": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421)),
    "erf of the cubic": lambda x: 0.5 * x * (1 + torch.erf(C * (x + 0.044715 * x**3))),
    "a divisor": lambda x: 0.5 / x * (1 + torch.erf(x / math.sqrt(2.0))),
    "the sum as a divisor": lambda x: 0.25 * x * (torch.tensor(0.5) / (1 + torch.erf(x / math.sqrt(2.0)))),
    "the sum twice": lambda x: (lambda total: 0.5 * x * (total * total))(1 + torch.erf(x / math.sqrt(2.0))),
    "doubles": lambda x: (lambda y: 0.5 * y * (1 + torch.erf(y / math.sqrt(2.0))))(x.double()),
    "no sum": lambda x: 0.5 * x * torch.tanh(C * (x + 0.044715 * x**3)),
}


class Formula(torch.nn.Module):
    """A formula on the result of another operator."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(torch.flip(x, (0,)))


def run_pass(module):
    """Return the number of changes, and the graph after them, whose results are PyTorch's."""
    x = torch.cat([torch.linspace(-4, 4, 801), torch.tensor([0.0, -0.0, 1e-20, -30.0])]).reshape(5, 161)
    model = graph_of(module, x)
    count = gelu.run(model)
    remove_unused.run(model)
    assert_results_of_torch(model, module, x, tolerance=TOLERANCE)
    return count, model


@pytest.mark.parametrize("name", TANH)
def test_approximation_becomes_one_operator(name):
    count, model = run_pass(Formula(TANH[name]))
    assert count == 1
    assert kinds(model)[-1] == "Gelu"
    assert not {*kinds(model)} & {"Tanh", "Mul", "Add", "Pow", "Div"}
    assert model.graph[-1].attributes["approximate"].as_string() == "tanh"


@pytest.mark.parametrize("name", ERF)
def test_exact_form_becomes_one_operator(name):
    count, model = run_pass(Formula(ERF[name]))
    assert count == 1
    assert not {*kinds(model)} & {"Erf", "Mul", "Add", "Div"}
    assert model.graph[-1].attributes["approximate"].as_string() == "none"


@pytest.mark.parametrize("name", OTHERS)
def test_other_formulas_are_unchanged(name):
    function = OTHERS[name]
    x = torch.linspace(0.1, 1, 10).reshape(2, 5)
    model = graph_of(Formula(function), x)
    before = kinds(model)
    assert gelu.run(model) == 0
    assert kinds(model) == before
    assert {"Tanh", "Erf"} & {*before}


def gelu_parts(x):
    """Return the values of which the last is Gelu's result."""
    cube = x + 0.044715 * x**3
    tanh = torch.tanh(C * cube)
    total = 1 + tanh
    product = x * total
    return cube, tanh, total, product, 0.5 * product


def test_other_readers_of_the_cube_keep_it():
    count, model = run_pass(Formula(lambda x: (gelu_parts(x)[0] * 0.01, gelu_parts(x)[-1])))
    assert count == 1
    assert "Gelu" in kinds(model)


@pytest.mark.parametrize("part", [1, 2, 3])
def test_formula_with_a_second_reader_is_unchanged(part):
    def formula(x):
        parts = gelu_parts(x)
        return parts[-1], parts[part]

    count, model = run_pass(Formula(formula))
    assert count == 0
    assert "Gelu" not in kinds(model)


def test_formula_of_a_broadcast_constant_is_unchanged():
    """A constant with more axes than x gives the result more axes, and Gelu would lose them."""
    one = torch.ones(1, 1, 1)
    module = Formula(lambda x: 0.5 * x * (one + torch.tanh(C * (x + 0.044715 * x**3))))
    model = graph_of(module, torch.ones(2, 3))
    assert gelu.run(model) == 0
