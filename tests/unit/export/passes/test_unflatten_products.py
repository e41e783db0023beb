"""Products of flattened rows are computed on the rows as they were, with PyTorch's results, where shapes prove it."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from support.torch_graphs import assert_results_of_torch, graph_of, kinds
from torch import nn
from transformers.pytorch_utils import Conv1D

from tformer_export.passes import gelu, remove_unused, run_passes, unflatten_products

K, N = 8, 12
TOLERANCE = (
    2 * 64 * K * 2.0**-24
)  # sums of K terms below 8, in an order of their own; a second product has 8 times that


def rows(*shape):
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1))


class Module(nn.Module):
    """A function of the module and x, with weights (K, N), (N, K) and biases."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(N))
        self.w2, self.b2 = nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.randn(K))
        self.linear = nn.Linear(K, N)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def changed_graph(module, x, before=()):
    """Return the number of products that were found, and the graph, whose results are PyTorch's."""
    model = graph_of(module, x)
    for run in before:
        run(model)
    count = unflatten_products.run(model)
    remove_unused.run(model)
    assert_results_of_torch(model, module, x, tolerance=TOLERANCE)
    return count, model


PLAIN = {
    "addmm": (lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w).view(*x.shape[:-1], N), ["MatMul", "Add"]),
    "scalar bias": (
        lambda m, x: torch.addmm(m.b[:1], x.view(-1, K), m.w).view(*x.shape[:-1], N),
        ["MatMul", "Add"],
    ),
    "mm": (lambda m, x: torch.mm(x.reshape(-1, K), m.w).view(*x.shape[:-1], N), ["MatMul"]),
    "mm, then bias": (lambda m, x: (x.view(-1, K) @ m.w + m.b).view(*x.shape[:-1], N), ["MatMul", "Add"]),
    "linear": (lambda m, x: m.linear(x.view(-1, K)).view(*x.shape[:-1], N), ["MatMul", "Add"]),
    "flatten": (
        lambda m, x: m.linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1]) if x.dim() > 2 else m.linear(x),
        ["MatMul", "Add"],
    ),
    "two layers": (
        lambda m, x: torch.addmm(
            m.b2, torch.relu(torch.addmm(m.b, x.view(-1, K), m.w)), m.w2
        ).view(x.shape),
        ["MatMul", "Add", "Relu", "MatMul", "Add"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_product_reads_the_rows_as_they_were(name, shape):
    function, expected = PLAIN[name]
    count, model = changed_graph(Module(function), rows(*shape))
    assert count == expected.count("MatMul")
    assert kinds(model) == expected


def test_conv1d_of_transformers_is_a_product():
    module = Conv1D(N, K)
    nn.init.normal_(module.bias)
    count, model = changed_graph(module, rows(3, 5))
    assert count == 1
    assert kinds(model) == ["MatMul", "Add"]


def test_spelled_out_gelu_between_products_is_one_operator():
    def layers(m, x):
        y = torch.addmm(m.b, x.view(-1, K), m.w)
        y = 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y * y * y)))
        return torch.addmm(m.b2, y, m.w2).view(x.shape)

    count, model = changed_graph(Module(layers), rows(3, 5) / 4, [gelu.run, remove_unused.run])
    assert count == 2
    assert kinds(model) == ["MatMul", "Add", "Gelu", "MatMul", "Add"]


def test_product_of_a_product_is_found():
    """Such as a matrix of low rank. Between them the rows are restored and flattened again."""

    def low_rank(m, x):
        y = torch.mm(x.view(-1, K), m.w).view(*x.shape[:-1], N)
        return torch.addmm(m.b2, y.view(-1, N), m.w2).view(x.shape)

    module, x = Module(low_rank), rows(3, 5)
    model = graph_of(module, x)
    assert run_passes(model, 48)["unflatten_products"] == 2
    assert_results_of_torch(model, module, x, tolerance=TOLERANCE)
    assert kinds(model) == ["MatMul", "MatMul", "Add"]


def test_products_of_the_same_flattened_rows_are_each_found():
    def two(m, x):
        flat = x.view(-1, K)
        return tuple(torch.addmm(b, flat, w).view(*x.shape[:-1], n) for b, w, n in ((m.b, m.w, N), (m.b2, m.w2.T, N)))

    module = Module(two)
    module.b2 = nn.Parameter(torch.randn(N))
    count, model = changed_graph(module, rows(3, 5))
    assert count == 2
    assert "Reshape" not in kinds(model)


def test_rows_that_several_reshapes_have_flattened_are_found():
    def heads(m, x):
        y = torch.sin(x).view(*x.shape[:-1], 2, K // 2)  # such as the heads of attention, that are joined again
        return torch.addmm(m.b, y.reshape(-1, K), m.w).view(*x.shape[:-1], N)

    count, model = changed_graph(Module(heads), rows(3, 5))
    assert count == 1
    assert kinds(model) == ["Sin", "MatMul", "Add"]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4)], ids=str)
def test_heads_are_joined_without_the_rows(shape):
    """The last two axes become one. The target has no size that is free."""

    def heads(m, x):
        y = x.unflatten(-1, (2, K // 2)).transpose(-1, -2)
        return torch.addmm(m.b, y.reshape(-1, K), m.w).view(*x.shape[:-1], N)

    count, model = changed_graph(Module(heads), rows(*shape))
    assert count == 1
    assert kinds(model) == ["Reshape", "Transpose", "Reshape", "MatMul", "Add"]
    (target,) = (node.inputs[1].const_value for node in list(model.graph)[-3:] if node.op_type == "Reshape")
    assert target.numpy().tolist() == [0] * len(shape) + [K]


def test_shared_weight_of_two_linears_is_transposed_once():
    def twice(m, x):
        y = m.linear(x.view(-1, K)).view(*x.shape[:-1], N)
        return y, m.linear((x * 2).view(-1, K)).view(*x.shape[:-1], N)

    count, model = changed_graph(Module(twice), rows(3, 5))
    assert count == 2
    weights = {node.inputs[1].name for node in model.graph if node.op_type == "MatMul"}
    assert len(weights) == 1


OTHERS = {
    "rows that are mixed": lambda m, x: torch.addmm(m.b, x.transpose(0, 1).reshape(-1, K), m.w).view(*x.shape[:-1], N),
    "axes in another order": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w).view(x.shape[1], x.shape[0], N),
    "heads and rows that are mixed": lambda m, x: torch.addmm(
        m.b, x.unflatten(-1, (2, K // 2)).transpose(-2, -3).reshape(-1, K), m.w
    ).view(*x.shape[:-1], N),
    "a width that is split": lambda m, x: torch.addmm(m.b[:6], x.view(-1, 4), m.w[:4, :6]).view(*x.shape[:-1], N),
    "a result in other rows": lambda m, x: torch.mm(x.view(-1, K), m.w).view(*x.shape[:-1], 2, N // 2),
    "a factor": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w, alpha=2).view(*x.shape[:-1], N),
    "a factor of the bias": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w, beta=0.5).view(*x.shape[:-1], N),
    "a bias that is computed": lambda m, x: torch.addmm(
        x.view(-1, K).sum(-1, keepdim=True), x.view(-1, K), m.w
    ).view(*x.shape[:-1], N),
    "rows of two axes": lambda m, x: (x.view(-1, 1, K) @ m.w).view(*x.shape[:-1], N),
    "a matrix that is computed": lambda m, x: torch.mm(x.view(-1, K), x.view(-1, K).T @ x.view(-1, K)).view(x.shape),
    "a sum of rows": lambda m, x: torch.mm(x.view(-1, K), m.w).cumsum(0).view(*x.shape[:-1], N),
    "a bias of rows": lambda m, x: (torch.mm(x.view(-1, K), m.w) + x.view(-1, K)[:, :1]).view(*x.shape[:-1], N),
    "no product": lambda m, x: torch.relu(x.view(-1, K)).view(x.shape),
    "no reshape back": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w),
    "a reader of the flat result": lambda m, x: (lambda y: (y.view(*x.shape[:-1], N), y.sin()))(
        torch.addmm(m.b, x.view(-1, K), m.w)
    ),
    "an output of the flat result": lambda m, x: (lambda y: (y.view(*x.shape[:-1], N), y))(
        torch.addmm(m.b, x.view(-1, K), m.w)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_reshapes_and_products_are_unchanged(name):
    module, x = Module(OTHERS[name]), rows(3, 5)
    before = kinds(graph_of(module, x))
    count, model = changed_graph(module, x)
    assert count == 0
    assert sorted(kinds(model)) == sorted(before)
    assert {"Gemm", "MatMul", "Relu"} & {*before}


def test_reshape_in_a_branch_of_a_product_outside_is_unchanged():
    """The branch would return a value of the graph around it, which no branch may."""

    def branches(m, x):
        y = torch.mm(x.view(-1, K), m.w)
        back = lambda y, z: y.view(*z.shape[:-1], N) * 1.0  # noqa: E731
        return torch.cond(x.sum() > 0, back, lambda y, z: z.repeat(1, 1, 2)[..., :N] * 2, (y, x))

    for sign in (1, -1):
        count, model = changed_graph(Module(branches), rows(3, 5).abs() * sign)
        assert count == 0
        assert kinds(model).count("MatMul") == 1


def test_products_in_a_branch_are_found():
    def branches(m, x):
        product = lambda z: torch.mm(z.view(-1, K), m.w).view(*z.shape[:-1], N)  # noqa: E731
        return torch.cond(x.sum() > 0, product, lambda z: z.repeat(1, 1, 2)[..., :N] * 2, (x,))

    for sign in (1, -1):
        count, _ = changed_graph(Module(branches), rows(3, 5).abs() * sign)
        assert count == 1


def test_sizes_without_names_are_no_proof():
    """Shape inference may know that an axis exists, but not its size."""
    model = graph_of(Module(PLAIN["addmm"][0]), rows(3, 5))
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        if value.shape is not None and len(value.shape) == 3:
            value.shape = type(value.shape)([None, None, value.shape[-1]])
    assert unflatten_products.run(model) == 0


def test_product_of_transposed_rows_is_unchanged():
    model = graph_of(Module(lambda m, x: torch.addmm(m.b2, x.view(-1, K), m.w[:, :K]).view(x.shape)), rows(2, K // 2))
    (gemm,) = (node for node in model.graph if node.op_type == "Gemm")
    gemm.attributes["transA"] = ir.AttrInt64("transA", 1)
    assert unflatten_products.run(model) == 0


def test_names_and_types_of_outputs_stay():
    model = graph_of(Module(PLAIN["addmm"][0]), rows(3, 5))
    (before,) = model.graph.outputs
    name, dtype = before.name, before.dtype
    assert unflatten_products.run(model) == 1
    (after,) = model.graph.outputs
    assert (after.name, after.dtype) == (name, dtype)
    assert after.producer().op_type == "Add"
