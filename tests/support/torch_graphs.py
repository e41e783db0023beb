"""PyTorch modules as ONNX graphs before the passes, and the results of both."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import torch

from tformer_export.lowering.to_onnx import OPSET


def graph_of(module: torch.nn.Module, *inputs: torch.Tensor) -> ir.Model:
    """Return a module as torch.onnx translates it. All axes but the last are free."""
    free = tuple(dict.fromkeys(range(x.dim() - 1), torch.export.Dim.DYNAMIC) for x in inputs)
    program = torch.export.export(module.eval(), inputs, dynamic_shapes=free, strict=False)
    exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, optimize=True, verbose=False)
    assert exported is not None
    return exported.model


def assert_results_of_torch(model: ir.Model, module: torch.nn.Module, *inputs: torch.Tensor, tolerance: float) -> None:
    """Run a graph in onnxruntime, and compare its results with those of the module."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    names = [port.name for port in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    with torch.no_grad():
        expected = module(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted, rtol=0, atol=tolerance)


def kinds(model: ir.Model) -> list[str]:
    """Return the operators that results depend on, without those of shapes."""
    return [node.op_type for node in model.graph if node.op_type not in ("Shape", "Concat", "Constant")]
