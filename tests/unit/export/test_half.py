"""What is computed in half precision, and what is not, on graphs of a few nodes; and what cannot be asked for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tformer_export import export
from tformer_export.passes.half import HALVES, run
from tformer_runtime.errors import OptionError, UnsupportedModelError

FP16 = HALVES["fp16"]


def halved(nodes, inputs, held, shape=("n", 4)):
    """A model with the output y, in half. inputs: name → (numpy type, shape); held: name → array."""
    kinds = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64, np.bool_: TensorProto.BOOL}
    graph = helper.make_graph(
        [helper.make_node(op, given, [made], **more) for op, given, made, more in nodes],
        "test",
        [helper.make_tensor_value_info(name, kinds[kind], size) for name, (kind, size) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    run(model, FP16)
    return model


def dtype(model, op):
    """Of the output of the one node of a kind."""
    (node,) = [node for node in model.graph if node.op_type == op]
    return node.outputs[0].dtype


def computed(model, **feeds):
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(["y"], feeds)[0]


def test_products_are_in_half_and_outputs_in_float32():
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    model = halved([("MatMul", ["x", "w"], "y", {})], {"x": (np.float32, ("n", 4))}, {"w": weight})
    assert dtype(model, "MatMul") == ir.DataType.FLOAT16
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    found = computed(model, x=x)
    assert found.dtype == np.float32
    exact = x.astype(np.float16).astype(np.float32) @ weight.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=2e-3)


def test_squares_that_half_cannot_hold_are_summed_in_float32():
    """√(mean(x²)) where x is 300 and x² is beyond 65504: written out, as norms often are."""
    axes, two, weight = np.array([-1]), np.array(2.0, np.float32), np.eye(4, dtype=np.float32)
    model = halved(
        [
            ("MatMul", ["x", "w"], "h", {}),
            ("Pow", ["h", "two"], "square", {}),
            ("ReduceMean", ["square", "axes"], "mean", {}),
            ("Sqrt", ["mean"], "root", {}),
            ("Div", ["h", "root"], "y", {}),
        ],
        {"x": (np.float32, ("n", 4))},
        {"w": weight, "two": two, "axes": axes},
    )
    assert dtype(model, "MatMul") == ir.DataType.FLOAT16
    assert dtype(model, "Div") == ir.DataType.FLOAT
    x = np.array([[300.0, -300.0, 300.0, 300.0]], np.float32)
    np.testing.assert_allclose(computed(model, x=x), [[1, -1, 1, 1]], rtol=1e-3)


def test_a_mask_of_the_lowest_float32_stays_what_it_is():
    """Rounded it would be −inf, and a row that it hides whole would be NaN."""
    low = np.array(np.finfo(np.float32).min)
    model = halved(
        [
            ("MatMul", ["x", "w"], "scores", {}),
            ("Where", ["keep", "zero", "low"], "bias", {}),
            ("Add", ["scores", "bias"], "masked", {}),
            ("Softmax", ["masked"], "share", {}),
            ("MatMul", ["share", "w"], "y", {}),
        ],
        {"x": (np.float32, ("n", 4)), "keep": (np.bool_, ("n", 4))},
        {"w": np.eye(4, dtype=np.float32), "zero": np.zeros((), np.float32), "low": low},
    )
    assert dtype(model, "Softmax") == ir.DataType.FLOAT
    x, keep = np.zeros((2, 4), np.float32), np.array([[True, True, False, False], [False] * 4])
    np.testing.assert_allclose(computed(model, x=x, keep=keep), [[0.5, 0.5, 0, 0], [0.25] * 4], atol=1e-3)


def test_positions_stay_exact():
    """4097 is no float16."""
    frequency = np.array([[1.0, 0.5, 0.25, 0.125]], np.float32)
    model = halved(
        [
            ("Cast", ["p"], "f", {"to": TensorProto.FLOAT}),
            ("MatMul", ["f", "w"], "angle", {}),
            ("Sin", ["angle"], "y", {}),
        ],
        {"p": (np.int64, ("n", 1))},
        {"w": frequency},
    )
    p = np.array([[4097], [60001]])
    np.testing.assert_allclose(computed(model, p=p), np.sin(p * frequency.astype(np.float64)), atol=5e-3)


def test_a_weight_beyond_half_is_refused():
    weight = np.full((4, 4), 1e5, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"weight w holds numbers beyond 65504.*choose fp32"):
        halved([("MatMul", ["x", "w"], "y", {})], {"x": (np.float32, ("n", 4))}, {"w": weight})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp16"}, "fp16 is for the target cuda"),
        ({"precision": "fp8"}, "precision is one of fp32, fp16"),
        ({"precision": "fp16", "target": "cuda", "quantize": "int8"}, "leave out fp16 or int8"),
    ],
)
def test_what_cannot_be_had(tmp_path, options, said):
    with pytest.raises(OptionError, match=said):
        export(nn.Linear(4, 4), tmp_path / "m.onnx", {"x": torch.zeros(2, 4)}, **options)
