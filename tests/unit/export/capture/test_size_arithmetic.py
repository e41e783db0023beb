"""The patch of torch's symbolic sizes changes nothing in what torch traces, and saves most of the arithmetic."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tformer_export.capture import size_arithmetic
from tformer_export.capture.size_arithmetic import OPERATIONS, size_arithmetic_kept


class Encoder(nn.Module):
    """One layer of torch's Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Sizes(nn.Module):
    """Sums, products, quotients, remainders, fractions and limits of sizes, and a condition on one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time = x.shape[1]
        blocks = nn.functional.pad(x, (0, 0, 0, -time % 4)).unflatten(1, (-1, 4)).sum(2)
        merged = x.reshape(-1, x.shape[2]) / (time / 2)
        window = x[:, : min(time, 6)] if time > 3 else x
        return blocks, merged, window, x.new_zeros(time * 2 - 1, max(time, x.shape[0]))


class SelectedRows(nn.Module):
    """A size that follows from data, and has no example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x.sum((1, 2)) > 0]
        return torch.cat([rows, rows]).flatten(1).mean(1)


class EqualSizes(nn.Module):
    """An addition that makes two axes one, in the middle of a trace: torch replaces a size by another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.transpose(1, 2) @ x
        square = before + x[:, :, : x.shape[1]].sum(0).T[None, :, :1]
        return square.flatten(1) + x.new_ones(x.shape[1] * x.shape[2]).sum()


@pytest.mark.parametrize("module", [Encoder(), Sizes(), SelectedRows(), EqualSizes()], ids=lambda m: type(m).__name__)
def test_traced_program_is_that_of_torch(module):
    batch, time = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC

    def traced() -> str:
        program = torch.export.export(module.eval(), (torch.ones(3, 10, 8),), dynamic_shapes=({0: batch, 1: time},))
        program = program.run_decompositions()
        sizes = [str(node.meta.get("val")) for node in program.graph.nodes]
        return f"{program.graph}\n{program.range_constraints}\n{program.graph_signature}\n{sizes}"

    expected = traced()
    with size_arithmetic_kept():
        assert traced() == expected


@pytest.fixture
def sizes():
    """Return two sizes of a trace, of which each may be any number."""
    environment = ShapeEnv(duck_shape=False)
    with size_arithmetic_kept():
        yield [
            environment.create_unspecified_symint_and_symbol(7, ConstantSource(name), DimDynamic.DYNAMIC)
            for name in ("one", "other")
        ]


def test_sizes_that_become_equal_are_computed_anew(sizes):
    one, other = sizes
    assert (one + 1).node.expr != (other + 1).node.expr
    assert one == other  # the trace goes on for equal sizes
    assert (one + 1).node.expr == (other + 1).node.expr


def test_equal_results_are_different_nodes(sizes):
    one, _ = sizes
    assert (one * 2).node is not (one * 2).node
    assert (one * 2).node.expr == 2 * one.node.expr


def test_most_operations_are_not_computed(monkeypatch):
    computed: Counter[str] = Counter()
    for name in OPERATIONS:
        monkeypatch.setattr(SymNode, name, _counted(vars(SymNode)[name], name, computed))

    def count() -> int:
        computed.clear()
        free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
        torch.export.export(Encoder().eval(), (torch.ones(3, 10, 8),), dynamic_shapes=free)
        return computed.total()

    without = count()
    with size_arithmetic_kept():
        assert count() < without / 4


def _counted(operation, name, computed):
    def run(*sizes):
        computed[name] += 1
        return operation(*sizes)

    return run


def test_torch_with_other_sizes_is_left_as_it_is(monkeypatch):
    methods = dict(vars(SymNode))
    with size_arithmetic_kept():
        assert vars(SymNode)["_add"] is not methods["_add"]
    monkeypatch.setattr(size_arithmetic, "OPERATIONS", (*OPERATIONS, "_operation_of_another_version"))
    size_arithmetic._knows_torch.cache_clear()
    with size_arithmetic_kept():
        assert dict(vars(SymNode)) == methods
    size_arithmetic._knows_torch.cache_clear()
