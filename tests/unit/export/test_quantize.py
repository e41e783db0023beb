"""int8: how far a weight moves, what is rewritten, and that a matrix in two places is held once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper

from tformer_export.quantize import quantize
from tformer_export.quantize.weights import per_column

floats = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=floats))
@settings(deadline=None, derandomize=True)
def test_a_weight_moves_by_half_a_step_at_most(weight):
    quantised, scale = per_column(weight)
    assert quantised.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == weight.shape[1:]
    assert (scale > 0).all()
    error = np.abs(weight.astype(np.float64) - quantised.astype(np.float64) * scale)
    # Dividing by the scale and the scale itself each round by 2⁻²⁴ of numbers up to 127 steps.
    assert (error <= scale * (0.5 + 2 * 127 * 2.0**-24)).all()
    assert not quantised[:, ~weight.any(0)].any()


def test_each_column_has_a_scale_of_its_own():
    quantised, scale = per_column(np.array([[1.0, 100.0], [-0.5, 25.0]], np.float32))
    np.testing.assert_allclose(scale, [1 / 127, 100 / 127], rtol=1e-6)
    assert quantised.tolist() == [[127, 127], [-64, 32]]  # halves go to the even neighbour


VOCABULARY, WIDTH = 60, 32


def tied(turned, steps=1):
    """ids → an embedding, → the same matrix as output projection: by Gemm's transB or as a matrix of its own."""
    table = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    weights = {"table": table, "bias": np.arange(VOCABULARY, dtype=np.float32), "flat": np.array([-1, WIDTH])}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Reshape", ["rows", "flat"], ["x"]),
    ]
    if turned:
        nodes.append(helper.make_node("Gemm", ["x", "table", "bias"], ["y"], transB=1))
    else:
        weights["columns"] = np.ascontiguousarray(table.T)
        nodes += [helper.make_node("MatMul", ["x", "columns"], ["p"]), helper.make_node("Add", ["p", "bias"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "time"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", VOCABULARY])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), table


@pytest.mark.parametrize("turned", [True, False])
def test_a_table_that_is_the_output_projection_too_is_held_once(turned):
    proto, table = tied(turned)
    model = ir.from_proto(proto)
    assert quantize(model).count == 2
    after = ir.to_proto(model)
    held = [t for t in after.graph.initializer if t.data_type == TensorProto.INT8]
    assert [list(t.dims) for t in held] == [[VOCABULARY, WIDTH]]
    assert not any(len(t.dims) == 2 and np.prod(t.dims) > VOCABULARY for t in after.graph.initializer if t not in held)
    ids = np.array([[3, 59, 0], [7, 7, 8]])
    (found,) = onnxruntime.InferenceSession(after.SerializeToString()).run(None, {"ids": ids})
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": ids})
    # x · w over WIDTH terms: either operand is off by half a step of 1/127 of its own maximum, once as a table and once
    # more as rows of activations.
    largest = np.abs(table).max()
    bound = WIDTH * (3 * 0.5 * largest / 127) * largest
    assert 0 < np.abs(found - expected).max() < bound / 4  # errors of either sign: far from all at their worst
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_small_matrices_stay():
    weight = np.eye(8, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))
    assert quantize(model).count == 0
    assert [node.op_type for node in model.graph] == ["MatMul"]
