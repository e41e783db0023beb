"""The patches of torch.onnx change nothing in the models that it writes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from onnxscript.rewriter import _matcher
from torch import nn
from torch.onnx._internal.exporter import _decomp
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tformer_export.lowering.torch_onnx_patches import (
    lacks_a_form,
    operator_table_kept,
    programs_not_decomposed,
    rules_tried_by_operator,
    traced_results_reused,
)


class ManyTypes(nn.Module):
    """Operations whose operands torch casts: to the other one's type, to that of a number, or to compute in float32."""

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = x.half()
        mixed = torch.where(numbers > 2, x, numbers) / 3 + numbers.sum(-1, keepdim=True) * 0.5
        return mixed, numbers.sqrt(), halves.softmax(-1) * numbers, numbers / 2 + (x > 0), halves.sum(-1).mean()


@pytest.mark.parametrize("patch", [operator_table_kept, traced_results_reused, rules_tried_by_operator])
def test_model_is_that_of_torch_onnx(patch):
    def written() -> bytes:
        inputs = torch.randn(2, 5), torch.arange(10).view(2, 5)
        program = torch.export.export(ManyTypes(), inputs, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) * 2)
        return torch.onnx.export(program, dynamo=True, opset_version=24).model_proto.SerializeToString()

    expected = written()
    with patch():
        assert written() == expected


def test_operation_is_not_traced_again_for_its_casts(monkeypatch):
    run: list[object] = []
    call = torch.fx.Interpreter.call_function
    monkeypatch.setattr(torch.fx.Interpreter, "call_function", lambda *args: run.append(args[1]) or call(*args))

    def count() -> int:
        run.clear()
        program = torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.randn(2, 3),))
        run.clear()
        with programs_not_decomposed():
            torch.onnx.export(program, dynamo=True, opset_version=24)
        return len(run)

    assert count() > 0
    with traced_results_reused():
        assert count() == 0


def test_rules_of_other_operators_are_not_tried(monkeypatch):
    begun: list[object] = []
    begin = _matcher.SimplePatternMatcher._init_match
    monkeypatch.setattr(
        _matcher.SimplePatternMatcher, "_init_match", lambda *args: begun.append(args[0].pattern) or begin(*args)
    )

    def count() -> int:
        begun.clear()
        program = torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.randn(2, 3),))
        torch.onnx.export(program, dynamo=True, opset_version=24)
        return len(begun)

    tried = count()
    with rules_tried_by_operator():
        assert count() < tried / 4
        assert {"Gemm", "Relu"} & {str(pattern.output_nodes[0].op) for pattern in begun}


def test_program_is_not_decomposed_nor_is_a_table_made_for_it(monkeypatch):
    made: list[object] = []
    make = _decomp.create_onnx_friendly_decomposition_table
    monkeypatch.setattr(
        _decomp, "create_onnx_friendly_decomposition_table", lambda *args: made.append(args) or make(*args)
    )
    program = torch.export.export(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.randn(2, 3),))
    expected = torch.onnx.export(program, dynamo=True, opset_version=24).model_proto.SerializeToString()
    assert made
    made.clear()
    with programs_not_decomposed():
        written = torch.onnx.export(program, dynamo=True, opset_version=24).model_proto.SerializeToString()
    assert not made
    assert written == expected


@pytest.fixture
def read(monkeypatch):
    """Return the tables that torch.onnx has read since."""
    tables: list[ONNXRegistry] = []
    register = ONNXRegistry._cleanup_registry_based_on_opset_version
    monkeypatch.setattr(
        ONNXRegistry,
        "_cleanup_registry_based_on_opset_version",
        lambda table: (tables.append(table), register(table)),
    )
    return tables


def test_table_is_read_again_when_torch_has_more_operators(read):
    """An import may add operators that torch.onnx has forms of, such as those of quantised programs."""
    with torch.library._scoped_library("aten", "FRAGMENT") as library, operator_table_kept():
        ONNXRegistry.from_torchlib(opset_version=24)
        read.clear()
        library.define("operator_of_a_test(Tensor x) -> Tensor")
        for _ in range(2):
            ONNXRegistry.from_torchlib(opset_version=24)
    assert len(read) == 1


def test_table_is_read_once_and_each_program_has_its_own(read):
    expected = {name: [*forms] for name, forms in ONNXRegistry.from_torchlib(opset_version=24).functions.items()}
    with operator_table_kept():
        ONNXRegistry.from_torchlib(opset_version=24)
        read.clear()
        table = ONNXRegistry.from_torchlib(opset_version=24)
        table.functions.clear()
    with operator_table_kept():
        assert ONNXRegistry.from_torchlib(opset_version=24).functions.keys() == expected.keys()
    assert not read
    ONNXRegistry.from_torchlib(opset_version=24)
    assert len(read) == 1


class Selects(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.where(x > 0)


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 1)
        return x.cumsum(0)


@pytest.mark.parametrize(("module", "fails"), [(Selects(), True), (Counts(), False)])
def test_program_that_torch_onnx_fails_on_is_known_before(module, fails):
    program = torch.export.export(module, (torch.randn(2, 5),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert lacks_a_form(program, 24) == fails
    with programs_not_decomposed(), pytest.raises(torch.onnx.OnnxExporterError) if fails else nullcontext():
        torch.onnx.export(program, dynamo=True, opset_version=24)
