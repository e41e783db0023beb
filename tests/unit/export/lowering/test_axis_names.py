"""A translated program has the names of free axes in the shapes of its results, which have these sizes when it runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tformer_export.lowering.to_onnx import to_onnx
from tformer_export.staging.emitter import Port, Program


class Sizes(torch.nn.Module):
    """Results with sizes of both inputs, of one, and of sums and products of them."""

    def forward(self, x, keys):
        y = torch.sin(x).view(x.shape[0], -1, 6)
        flat = torch.tanh(y).view(-1, 6)
        scores = torch.softmax(y @ keys.transpose(1, 2), -1)
        return scores.sin(), torch.cat([keys, y], 1).cos(), flat.neg()


def program_and_model():
    shapes = ("batch", "new", 6), ("batch", "slot", 6)
    inputs = [Port(name, torch.float32, shape) for name, shape in zip(("x", "keys"), shapes, strict=True)]
    outputs = [
        Port("scores", torch.float32, ("batch", "new", "slot")),
        Port("both", torch.float32, ("batch", "slot + new", 6)),
        Port("flat", torch.float32, ("rows", 6)),
    ]
    program = Program(torch.fx.symbolic_trace(Sizes()), inputs, outputs)
    return program, to_onnx(program)


def shape_of(value):
    return [size if isinstance(size, int) else size.value for size in value.shape]


def test_results_have_the_names_of_free_axes():
    _, model = program_and_model()
    found = {node.op_type: shape_of(node.outputs[0]) for node in model.graph}
    assert found["Sin"] == ["batch", "new", "slot"]  # the last of two
    assert found["Softmax"] == ["batch", "new", "slot"]
    assert found["Transpose"] == ["batch", 6, "slot"]
    assert found["Tanh"] == ["batch", "new", 6]
    assert found["Concat"][0] == found["Cos"][0] == "batch"
    assert not {"batch", "new", "slot"} & {found["Concat"][1], found["Neg"][0]}


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 1, 1), (3, 1, 5), (1, 4, 1), (4, 4, 4)], ids=str)
def test_named_axes_have_the_sizes_of_the_inputs(sizes):
    program, model = program_and_model()
    size = dict(zip(("batch", "new", "slot"), sizes, strict=True))
    named = {value.name: shape_of(value) for node in model.graph for value in node.outputs if value.shape is not None}
    proto = ir.to_proto(model)
    known = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in named if name not in known)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {port.name: np.zeros([size.get(axis, axis) for axis in port.shape], np.float32) for port in program.inputs}
    for (name, axes), result in zip(named.items(), session.run([*named], feeds), strict=True):
        for axis, number in zip(axes, result.shape, strict=True):
            assert size.get(axis, number if isinstance(axis, str) else axis) == number, name
