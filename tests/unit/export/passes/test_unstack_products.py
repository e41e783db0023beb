"""Products with a stack of matrices become products with single matrices, with PyTorch's results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.torch_graphs import assert_results_of_torch, graph_of
from torch import nn

from tformer_export.common.ir_edit import weight_sizes
from tformer_export.passes import PASSES, PassSettings, remove_unused, unstack_products

E, K, N = 3, 16, 64
TOLERANCE = 64 * K * 2.0**-24  # sums of K products, in an order of their own


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    """Let matrices of K · N numbers have rows of their own."""
    monkeypatch.setattr(unstack_products, "MIN_OWN_VALUES", K * N)


class Stack(nn.Module):
    """A function of the module and x (batch, time, K), with stacks of matrices."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.rows_first = nn.Parameter(torch.randn(E, K, N)), nn.Parameter(torch.randn(E, N, K))
        self.of_two, self.one = nn.Parameter(torch.randn(2, E, K, N)), nn.Parameter(torch.randn(1, K, N))
        self.apart, self.bias = nn.Parameter(torch.randn(E, 1, K, N)), nn.Parameter(torch.randn(E, 1, N))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def by_matrix(x):
    """Return rows of its own for each matrix: (batch, time, K) → (E, batch · time, K)."""
    return torch.stack([(n + 1.0) * x.reshape(-1, K) for n in range(E)])


# The product; the number of products that it becomes
SHARED = {
    "bmm, expand": lambda m, x: torch.bmm(x.reshape(1, -1, K).expand(E, -1, -1), m.w),
    "bmm, repeat": lambda m, x: torch.bmm(x.reshape(1, -1, K).repeat(E, 1, 1), m.w),
    "repeat of rows": lambda m, x: torch.bmm(x.reshape(-1, K).repeat(E, 1).view(E, -1, K), m.w),
    "baddbmm": lambda m, x: torch.baddbmm(m.bias, x.reshape(1, -1, K).repeat(E, 1, 1), m.w),
    "broadcast": lambda m, x: x.unsqueeze(1) @ m.w,
    "fewer axes": lambda m, x: x.reshape(-1, K) @ m.w,
    "transposed": lambda m, x: x.unsqueeze(1) @ m.rows_first.transpose(1, 2),
    "two axes": lambda m, x: x[:, None, None] @ m.of_two,
    "two axes, fewer of rows": lambda m, x: x.reshape(-1, K) @ m.of_two,
    "a stack of one": lambda m, x: x @ m.one,
    "one along another axis": lambda m, x: x.unsqueeze(0) @ m.apart,
}
OWN = {
    "bmm": (lambda m, x: torch.bmm(by_matrix(x), m.w), E),
    "own and shared": (lambda m, x: by_matrix(x) @ m.of_two, E),
    "own along one axis": (lambda m, x: torch.stack([x, -x, 2 * x]) @ m.apart, E),
    "both axes": (lambda m, x: torch.stack([by_matrix(x), -by_matrix(x)]) @ m.of_two, 2 * E),
}


def products(model):
    return [node for node in model.graph if node.op_type == "MatMul"]


def has_stack(model):
    return any(
        v is not None and v.const_value is not None and len(weight_sizes(v.const_value)) > 2
        for node in products(model)
        for v in node.inputs
    )


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_stack_becomes_matrices(name):
    function, count = OWN[name] if name in OWN else (SHARED[name], 1)
    module, x = Stack(function), torch.randn(2, 5, K, generator=torch.Generator().manual_seed(1))
    model = graph_of(module, x)
    assert unstack_products.run(model) == 1
    remove_unused.run(model)
    assert (len(products(model)), has_stack(model)) == (count, False)
    for size in ((2, 5), (3, 4)):
        assert_results_of_torch(model, module, torch.randn(*size, K), tolerance=TOLERANCE)


def matmul(rows, stack):
    """Return a graph of a product with a constant stack. rows: the shape of the operand."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal(stack, np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "graph", [x], [y], [weight])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))


@pytest.mark.parametrize(
    ("rows", "stack"),
    [
        (["e", "m", K], (E, K, N)),  # along an axis of unknown size the rows may be shared or not
        ([E, "m", 4], (E, 4, 8)),  # a matrix with rows of its own has too few numbers
        ([300, "m", K], (300, K, N)),  # too many products
        ([K], (E, K, N)),
    ],
)
def test_other_products_stay(rows, stack):
    model = matmul(rows, stack)
    assert unstack_products.run(model) == 0
    assert [node.op_type for node in model.graph] == ["MatMul"]


def test_batch_that_is_repeated_stays_repeated():
    """The repetition is along an axis that is none of the stack's, so that the result has it too."""
    function = lambda m, x: x[:1].unsqueeze(1).expand(4, 1, -1, -1) @ m.w  # noqa: E731
    module, x = Stack(function), torch.randn(2, 5, K)
    model = graph_of(module, x)
    assert unstack_products.run(model) == 1
    assert_results_of_torch(model, module, x, tolerance=TOLERANCE)


def test_files_in_half_precision_keep_stacks():
    (one_pass,) = [one for one in PASSES if one.name == "unstack_products"]
    assert one_pass.run(matmul([E, "m", K], (E, K, N)), PassSettings(8, {}, "cuda", half=True)) == 0
    assert one_pass.run(matmul([E, "m", K], (E, K, N)), PassSettings(8, {}, "cuda")) == 0
    assert one_pass.run(matmul([E, "m", K], (E, K, N)), PassSettings(8, {}, "cpu")) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.unsqueeze(1) @ m.w + m.w.index_select(0, (x[0, :1, 0] > 0).long()).sum(1),
        lambda m, x: (
            torch.bmm(by_matrix(x), m.w).sum() + x.unsqueeze(1) @ m.w
        ),  # by matrices, and all next to each other
    ],
)
def test_numbers_of_a_stack_are_stored_once(function):
    module, x = Stack(function), torch.randn(2, 5, K, generator=torch.Generator().manual_seed(1))
    model = graph_of(module, x)
    unstack_products.run(model)
    remove_unused.run(model)
    stored = sum(v.const_value.size for v in model.graph.initializers.values() if v.const_value is not None)
    assert E * K * N <= stored < 2 * E * K * N
    assert_results_of_torch(model, module, x, tolerance=64 * TOLERANCE)


def test_two_products_of_a_stack_share_its_matrices():
    module, x = Stack(lambda m, x: x.unsqueeze(1) @ m.w + (2 * x).unsqueeze(1) @ m.w), torch.randn(2, 5, K)
    model = graph_of(module, x)
    assert unstack_products.run(model) == 2
    remove_unused.run(model)
    assert sum(v.const_value.size for v in model.graph.initializers.values()) < 2 * E * K * N
    assert_results_of_torch(model, module, x, tolerance=TOLERANCE)
