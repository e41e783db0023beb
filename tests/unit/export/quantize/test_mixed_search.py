"""The search for bits on invented costs: the order of its path, its bisection and the budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from support.small_graphs import model_of
from support.small_models import EXAMPLE, Mixer, Small, joined
from torch.nn import functional as F

from tformer_export import export
from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.quantize import BitPlanner, quantize_weights
from tformer_export.quantize.matrices import FLOAT_BITS, Matrix, find_matrices
from tformer_export.quantize.mixed_search import MixedSearch, fill, make_path
from tformer_export.quantize.token_quality import TokenQuality
from tformer_runtime import OptionError


def matrices(*shapes):
    return [Matrix(shape, [f"m{i}"]) for i, shape in enumerate(shapes)]


def test_path_takes_cheapest_bytes_first():
    weights = matrices((64, 64), (64, 64), (64, 128))
    weights[2].tables.append("table")
    sensitivities = {"m0": {8: 0.0, 6: 0.1, 4: 0.5}, "m1": {8: 0.3, 6: 0.306, 4: 0.31}, "m2": {8: 9.0}}
    path = make_path(weights, sensitivities)
    # m0 to 8 bits costs nothing; m1 is cheapest a byte if it takes its steps at once; m0's others are the dearest.
    assert [tuple(p.values()) for p in path] == [(32, 32, 8), (8, 32, 8), (8, 4, 8), (6, 4, 8), (4, 4, 8)]
    assert [tuple(p.values()) for p in make_path(weights, {m.name: {} for m in weights})][-1] == (4, 4, 8)


@pytest.mark.parametrize(
    ("inner", "choices"),
    [
        (1, (32,)), (7, (6, 8, 32)), (9, (8, 32)), (10, (6, 8, 32)), (16, (4, 6, 8, 32)), (17, (6, 8, 32)),
        (18, (6, 8, 32)), (19, (6, 8, 32)), (25, (4, 6, 8, 32)),
    ],
)  # fmt: skip
def test_choices_exclude_bits_that_save_no_bytes(inner, choices):
    """The reference is the number of bytes in a file of one product."""
    stored_bytes = {bits: count_stored_bytes(inner, bits) for bits in (4, 6, 8, 32)}
    (matrix,) = find_matrices(product(inner))
    assert {bits: matrix.size(bits) for bits in stored_bytes} == stored_bytes
    assert matrix.choices == choices
    path = make_path([matrix, *matrices((64, 64))], {matrix.name: {8: 0.1, 6: 0.15, 4: 0.25}, "m0": {8: 0.3, 4: 0.4}})
    assert list(dict.fromkeys(plan[matrix.name] for plan in path)) == sorted(choices, reverse=True)
    sizes = [matrix.size(plan[matrix.name]) for plan in path]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("inner", [7, 9, 18, 64])
def test_uniform_plan_never_enlarges_a_matrix(inner, tmp_path):
    plan = BitPlanner(product(inner), None, None, None, tmp_path).uniform(4)
    assert plan.bits == {"product": {7: 6, 9: 8, 18: 6, 64: 4}[inner]}
    assert len(plan.integers["product"]) == (3 if inner == 64 else 2)


@pytest.mark.parametrize("inner", [7, 9, 18])
def test_search_includes_matrices_without_four_bits(inner):
    weights = matrices((inner, 128), (64, 64), (1, 2048))
    costs_model = InventedCosts(weights, {"m0": 0.001, "m1": 0.002, "m2": 0.001})
    mixture = MixedSearch(costs_model, costs_model, costs_model).run(DegradationBudget(tokens=0.5))
    assert mixture.frontier[mixture.within(DegradationBudget(tokens=0.5))[0]].plan == {
        "m0": {7: 6, 9: 8, 18: 6}[inner],
        "m1": 4,
        "m2": FLOAT_BITS,
    }


def test_model_without_matrices_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(OptionError, match=r"no constant matrix of 1024 numbers or more, so that there are no bits"):
        export(Small(Averages), path, EXAMPLE, "tgt", quantization="mixed")
    assert not path.exists()


class Averages(Mixer):
    def forward(self, x, tgt):
        query, key, value = self.heads(x)
        return joined(F.scaled_dot_product_attention(query, key, value, is_causal=True))


def product(inner):
    """Return a model of one product: x (rows, inner) times a matrix of about 2048 numbers."""
    columns = max(128, 2048 // inner)
    weight = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    return ir.from_proto(model_of(nodes, {"x": ["rows", inner]}, {"y": ["rows", columns]}, {"w": weight}))


def count_stored_bytes(inner, bits):
    """Return the bytes of a matrix and its scales in the file, without the tables that all matrices share."""
    model = product(inner)
    if bits != FLOAT_BITS:
        quantize_weights(model, bits)
    tensors = [t for t in ir.to_proto(model).graph.initializer if not t.name.startswith("form.")]
    arrays = [numpy_helper.to_array(tensor) for tensor in tensors]
    return sum(array.nbytes for array in arrays if array.size >= 128)


@dataclass
class InventedCosts:
    """A simulation with a reference of quality: the cost of each matrix is invented, and costs add up."""

    matrices: list[Matrix]
    costs: dict[str, float]
    passes: int = 0

    def set_bits(self, plan):
        self.engine = plan

    def quality(self, plan):
        self.passes += 1
        alone = [self.costs[name] * {4: 1, 6: 0.2, 8: 0.01, FLOAT_BITS: 0}[bits] for name, bits in plan.items()]
        total = sum(alone) * (1 + 0.05 * sum(cost > 0 for cost in alone))
        return TokenQuality(total, 1 - total, 2.0, 2.0, 100)


@pytest.mark.parametrize("tokens", [0.0005, 0.004, 0.02, 0.05, 0.3, 0.9])
def test_search_finds_smallest_plan_within_budget(tokens):
    random = np.random.default_rng(0)
    weights = matrices(*[(64, 64 * int(n)) for n in random.integers(1, 5, 40)])
    costs = {m.name: float(cost) for m, cost in zip(weights, random.exponential(0.004, 40), strict=True)}
    costs_model, budget = InventedCosts(weights, costs), DegradationBudget(tokens=tokens)
    mixture = MixedSearch(costs_model, costs_model, costs_model).run(budget)
    path = make_path(weights, mixture.sensitivities)
    fitting = [plan for plan in path if costs_model.quality(plan).changed <= tokens]
    chosen = mixture.frontier[mixture.within(budget)[0]]
    assert chosen.plan == fitting[-1]
    assert chosen.quality == costs_model.quality(chosen.plan)
    assert costs_model.passes <= 3 * 40 + 20 + len(path) + 1


@pytest.mark.parametrize("max_bits", [4.9, 5.5, 7.0, 8.5])
@pytest.mark.parametrize("tokens", [None, 0.02])
def test_search_finds_plan_of_least_loss_with_few_bits(max_bits, tokens):
    random = np.random.default_rng(1)
    weights = matrices(*[(64, 64 * int(n)) for n in random.integers(1, 5, 40)])
    costs = {m.name: float(cost) for m, cost in zip(weights, random.exponential(0.004, 40), strict=True)}
    costs_model, budget = InventedCosts(weights, costs), DegradationBudget(tokens=tokens)
    result = MixedSearch(costs_model, costs_model, costs_model).run(budget, max_bits)

    def bits(plan):
        stored = {m.name: count_bytes(m.shape, plan[m.name]) for m in weights}
        return 8 * sum(stored.values()) / sum(m.shape[0] * m.shape[1] for m in weights)

    allowed = 1 if tokens is None else tokens
    fitting = [
        plan
        for plan in make_path(weights, result.sensitivities)
        if bits(plan) <= max_bits and costs_model.quality(plan).changed <= allowed
    ]
    found = [result.frontier[i] for i in result.within(budget, max_bits)]
    assert all(bits(point.plan) <= max_bits and point.quality.changed <= allowed for point in found)
    losses = [point.quality.divergence for point in found]
    assert losses == sorted(losses)
    assert (found == []) == (fitting == [])
    assert losses[:1] <= [min(costs_model.quality(plan).divergence for plan in fitting)] if fitting else True


def test_large_matrix_that_does_not_fit_leaves_its_bits_to_others():
    """The best of all mixtures is found by trying each."""
    weights = matrices((64, 64), (64, 1024), (64, 128), (64, 96))
    sensitivities = {"m0": {4: 0.2, 6: 0.02}, "m1": {4: 9.0, 6: 1.0}, "m2": {4: 0.3, 6: 0.03}, "m3": {4: 0.1, 6: 0.02}}
    max_bits = (8 * sum(count_bytes(m.shape, 4) for m in weights) / sum(64 * m.shape[1] for m in weights)) + 0.6
    plans = [
        {m.name: bits for m, bits in zip(weights, choice, strict=True)}
        for choice in itertools.product((4, 6, 8), repeat=4)
    ]

    def loss(plan):
        return sum(sensitivities[name].get(bits, 0) for name, bits in plan.items())

    def bits(plan):
        return 8 * sum(count_bytes(m.shape, plan[m.name]) for m in weights) / sum(64 * m.shape[1] for m in weights)

    best = min((plan for plan in plans if bits(plan) <= max_bits), key=loss)
    assert best == fill(weights, sensitivities, max_bits) == {"m0": 8, "m1": 4, "m2": 6, "m3": 8}
    assert [p for p in make_path(weights, sensitivities) if bits(p) <= max_bits] == [dict.fromkeys(best, 4)]


def count_bytes(shape, bits):
    """Return the bytes of a matrix whose K is a multiple of 16: 16 weights of 4 bits have a code, columns a scale."""
    inner, columns = shape
    return inner * columns * bits / 8 + (bits == 4) * inner * columns / 16 + (bits <= 8) * 4 * columns


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, DegradationBudget()), (0.02, DegradationBudget(tokens=0.02)), ("0.02",
        DegradationBudget(tokens=0.02)), ("2%", DegradationBudget(tokens=0.02)),
        ("0", DegradationBudget(tokens=0.0)), ("100 %", DegradationBudget(tokens=1.0)), ("1.05x",
        DegradationBudget(perplexity=1.05)),
        (1e-05, DegradationBudget(tokens=1e-5)),
    ],
)  # fmt: skip
def test_budget_is_parsed(text, budget):
    assert DegradationBudget.of(text) == budget


@pytest.mark.parametrize("text", ["2", "101%", "0.9x", "-1%", "much", "1%x", "", "nan", float("nan")])
def test_invalid_budget_raises_option_error(text):
    with pytest.raises(OptionError, match=r"such as 1% or 0\.01, or times the perplexity such as 1\.02x"):
        DegradationBudget.of(text)


def test_budget_reports_the_exceeded_limit():
    assert DegradationBudget().exceeded(1.0, 99.0) is None
    assert DegradationBudget(tokens=0.01).exceeded(0.01, 99.0) is None
    assert DegradationBudget(tokens=0.01).exceeded(0.02, 1.0) == "changes 2.0% of the tokens and 1.0% is allowed"
    assert DegradationBudget(perplexity=1.02).exceeded(0.9, 1.01) is None
    assert (
        DegradationBudget(perplexity=1.02).exceeded(0.0, 1.05)
        == "multiplies the perplexity by 1.0500 and 1.02 is allowed"
    )
    assert DegradationBudget(perplexity=1.02).exceeded(0.0, float("nan")) is not None
