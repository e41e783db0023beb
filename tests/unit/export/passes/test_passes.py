"""Each pass on a small graph: the nodes before and after, and equal outputs in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from support.small_graphs import model_of

from tformer_export.passes import (
    drop_reshapes,
    merge_projections,
    remove_unused,
    rms_norm,
    strip_debug_info,
    tie_embeddings,
    transposed_matmul,
)

WIDTH = 8


def model(nodes, inputs, outputs, weights):
    proto = model_of(nodes, inputs, outputs, weights)
    onnx.checker.check_model(proto)
    return proto


def outputs(proto):
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    random = np.random.default_rng(3)
    feeds = {
        i.name: random.standard_normal([3 if isinstance(d, str) else d for d in i.shape]) for i in session.get_inputs()
    }
    return session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})


def run_pass(run, proto):
    """Return the number of changes and the model after the pass. Its outputs must match the outputs before."""
    before = outputs(proto)
    after = ir.from_proto(proto)
    changed = run(after)
    written = ir.to_proto(after)
    for actual, expected in zip(outputs(written), before, strict=True):
        # The same products of a row and a column, in kernels that may sum in another order: 8 terms of about 1.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    return changed, written


def kinds(proto):
    return [node.op_type for node in proto.graph.node]


def weight(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def projection_model(biases, widths=(WIDTH, WIDTH, WIDTH), bias_shape=None):
    """Return a model with a product of x for each width, with a bias where `biases` is true."""
    nodes, weights, results = [], {}, {}
    for i, (width, biased) in enumerate(zip(widths, biases, strict=True)):
        weights[f"w{i}"] = weight(i, WIDTH, width)
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"p{i}" if biased else f"y{i}"]))
        if biased:
            weights[f"b{i}"] = weight(10 + i, *(bias_shape or (width,)))
            order = [f"p{i}", f"b{i}"] if i % 2 else [f"b{i}", f"p{i}"]
            nodes.append(helper.make_node("Add", order, [f"y{i}"]))
        results[f"y{i}"] = ["rows", "time", width]
    return model(nodes, {"x": ["rows", "time", WIDTH]}, results, weights)


@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
def test_three_projections_are_merged(biases):
    changed, after = run_pass(merge_projections.run, projection_model(biases))
    assert changed == 2
    assert kinds(after) == ["MatMul", *(["Add"] if any(biases) else []), "Split"]


def test_merged_projections_keep_output_names_and_types():
    """The runtime binds the outputs of a file by name."""
    proto = projection_model((True, False), (WIDTH, WIDTH))
    _, after = run_pass(merge_projections.run, proto)
    assert list(after.graph.output) == list(proto.graph.output)


def test_projections_of_different_widths_are_merged():
    changed, after = run_pass(merge_projections.run, projection_model((True, True), (WIDTH, 3 * WIDTH)))
    assert changed == 1
    assert kinds(after) == ["MatMul", "Add", "Split"]


def test_projections_with_scalar_bias_are_merged():
    changed, _ = run_pass(merge_projections.run, projection_model((True, True), (WIDTH, WIDTH), bias_shape=(1,)))
    assert changed == 1


def test_sum_that_is_wider_than_its_product_is_no_bias():
    """Such as one gate for all heads, with a number of each head added."""
    proto = projection_model((True, True), (1, 1), bias_shape=(WIDTH,))
    for value in proto.graph.output:
        value.type.tensor_type.shape.dim[2].dim_value = WIDTH
    changed, after = run_pass(merge_projections.run, proto)
    assert changed == 1
    assert kinds(after) == ["MatMul", "Split", "Add", "Add"]


def test_single_projection_is_unchanged():
    proto = projection_model((True,), (WIDTH,))
    changed, after = run_pass(merge_projections.run, proto)
    assert changed == 0
    assert kinds(after) == kinds(proto)


def test_many_projections_are_not_merged():
    changed, after = run_pass(merge_projections.run, projection_model((False,) * 6, (WIDTH,) * 6))
    assert changed == 0
    assert kinds(after) == ["MatMul"] * 6


def test_product_with_second_reader_is_merged():
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["p0"]),
        helper.make_node("Add", ["p0", "b0"], ["y0"]),
        helper.make_node("MatMul", ["x", "w1"], ["p1"]),
        helper.make_node("Add", ["p1", "b0"], ["biased"]),
        helper.make_node("Mul", ["biased", "p0"], ["y1"]),
    ]
    weights = {"w0": weight(0, WIDTH, WIDTH), "w1": weight(1, WIDTH, WIDTH), "b0": weight(2, WIDTH)}
    shape = ["rows", WIDTH]
    changed, after = run_pass(merge_projections.run, model(nodes, {"x": shape}, {"y0": shape, "y1": shape}, weights))
    assert changed == 1
    assert kinds(after).count("MatMul") == 1


def test_product_that_is_a_graph_output_is_merged():
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["y0"]),
        helper.make_node("Add", ["y0", "b0"], ["y1"]),
        helper.make_node("MatMul", ["x", "w1"], ["y2"]),
    ]
    weights = {"w0": weight(0, WIDTH, WIDTH), "w1": weight(1, WIDTH, WIDTH), "b0": weight(2, WIDTH)}
    shape = ["rows", WIDTH]
    proto = model(nodes, {"x": shape}, dict.fromkeys(("y0", "y1", "y2"), shape), weights)
    changed, after = run_pass(merge_projections.run, proto)
    assert changed == 1
    assert [value.name for value in after.graph.output] == ["y0", "y1", "y2"]


def test_consecutive_reshapes_become_one():
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Reshape", ["split", "flat"], ["joined"]),
        helper.make_node("Relu", ["joined"], ["y"]),
    ]
    weights = {"heads": np.array([3, 5, 2, 4]), "flat": np.array([15, -1])}
    proto = model(nodes, {"x": [3, 5, WIDTH]}, {"y": [15, WIDTH]}, weights)
    changed, after = run_pass(lambda m: drop_reshapes.run(m) * 10 + remove_unused.run(m), proto)
    assert changed == 11
    assert kinds(after) == ["Reshape", "Relu"]


def test_reshape_that_copies_a_size_is_unchanged():
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Reshape", ["split", "copy"], ["joined"]),
        helper.make_node("Relu", ["joined"], ["y"]),
    ]
    weights = {"heads": np.array([15, 2, 4]), "copy": np.array([0, -1])}
    proto = model(nodes, {"x": [3, 5, WIDTH]}, {"y": [15, WIDTH]}, weights)
    changed, after = run_pass(drop_reshapes.run, proto)
    assert changed == 0
    assert kinds(after) == ["Reshape", "Reshape", "Relu"]


def test_reshape_to_same_shape_is_removed():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "same"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    proto = model(nodes, {"x": [3, WIDTH]}, {"y": [3, WIDTH]}, {"same": np.array([3, -1])})
    proto = onnx.shape_inference.infer_shapes(proto)
    changed, after = run_pass(lambda m: drop_reshapes.run(m) * 10 + remove_unused.run(m), proto)
    assert changed == 11
    assert kinds(after) == ["Relu", "Neg"]


def test_strip_removes_debug_info():
    proto = projection_model((True, True), (WIDTH, WIDTH))
    proto.producer_name, proto.doc_string = "pytorch", "at /home/me/model.py"
    entry = {"key": "pkg.torch.onnx.stack_trace", "value": "File /home/me/model.py"}
    proto.graph.doc_string = "secret"
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        holder.metadata_props.add(**entry)
    for holder in proto.graph.initializer:
        holder.metadata_props.add(**entry)
    for node in proto.graph.node:
        node.doc_string = "secret"
    _, after = run_pass(strip_debug_info.run, proto)
    content = after.SerializeToString()
    for text in (b"/home/me", b"secret", b"pkg.torch", b"pytorch"):
        assert text not in content
    assert kinds(after) == kinds(proto)


# -- tied embeddings ------------------------------------------------------------------------------------------------


def tied_model(perm=(1, 0)):
    table = weight(0, WIDTH, WIDTH)
    nodes = [
        helper.make_node("Gather", ["table", "one"], ["row"], axis=0),
        helper.make_node("Transpose", ["table"], ["turned"], perm=perm),
        helper.make_node("Add", ["x", "row"], ["sum"]),
        helper.make_node("MatMul", ["sum", "turned"], ["y"]),
    ]
    ports = {"x": ["rows", "time", WIDTH]}, {"y": ["rows", "time", WIDTH]}
    return model(nodes, *ports, {"table": table, "one": np.array([1])})


def test_product_with_transposed_table_is_fused():
    changed, after = run_pass(transposed_matmul.run, tied_model())
    assert changed == 1
    assert "MatMul" not in kinds(after)
    assert "FusedMatMul" in kinds(after)
    assert [o.name for o in after.graph.output] == ["y"]
    assert {o.domain: o.version for o in after.opset_import}["com.microsoft"] == 1


def test_identity_transpose_is_not_fused():
    changed, after = run_pass(transposed_matmul.run, tied_model(perm=(0, 1)))
    assert changed == 0
    assert "FusedMatMul" not in kinds(after)


def test_tied_table_is_stored_once():
    table = weight(0, WIDTH, WIDTH)
    nodes = [
        helper.make_node("Gather", ["table", "one"], ["row"], axis=0),
        helper.make_node("Add", ["x", "row"], ["sum"]),
        helper.make_node("MatMul", ["sum", "copy"], ["y"]),
    ]
    initializers = {"table": table, "one": np.array([1]), "copy": np.ascontiguousarray(table.T)}
    proto = model(nodes, {"x": ["rows", "time", WIDTH]}, {"y": ["rows", "time", WIDTH]}, initializers)
    changed, after = run_pass(tie_embeddings.run, proto)
    assert changed == 1
    assert {tensor.name for tensor in after.graph.initializer} == {"table", "one"}
    assert run_pass(transposed_matmul.run, after)[0] == 1


# -- root mean square norms --------------------------------------------------------------------------------------


def root_mean_square(
    square="Pow", divide="Reciprocal", has_weight=True, axes=(-1,), epsilon=1e-5, read_twice=False, is_output=False
):
    weights = {"epsilon": np.float32(epsilon), "axes": np.array(axes), "two": np.float32(2), "w": weight(0, WIDTH)}
    nodes = [
        helper.make_node(square, ["x", "two" if square == "Pow" else "x"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "epsilon"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["root"]),
    ]
    normal = "normal" if has_weight else "y"
    if divide == "Reciprocal":
        nodes += [helper.make_node("Reciprocal", ["root"], ["inverse"])]
        nodes += [helper.make_node("Mul", ["x", "inverse"], [normal])]
    else:
        nodes += [helper.make_node("Div", ["x", "root"], [normal])]
    nodes += [helper.make_node("Mul", ["w", "normal"], ["y"])] if has_weight else []
    nodes += [helper.make_node("Neg", ["root"], ["z"])] if read_twice else []
    shape = ["rows", "time", WIDTH]
    nodes += [helper.make_node("Relu", ["y"], ["out"])]
    outputs = {"out": shape} | ({"z": ["rows", "time", 1]} if read_twice else {}) | ({"y": shape} if is_output else {})
    used = {name for node in nodes for name in node.input}
    return model(nodes, {"x": shape}, outputs, {n: np.asarray(w) for n, w in weights.items() if n in used})


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("divide", ["Reciprocal", "Div"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_becomes_one_operator(square, divide, has_weight):
    changed, after = run_pass(
        lambda m: rms_norm.run(m) * 10 + remove_unused.run(m), root_mean_square(square, divide, has_weight, epsilon=0.1)
    )
    assert changed == 11
    assert kinds(after) == ["RMSNormalization", "Relu"]


def test_rms_norm_that_is_a_graph_output_is_fused():
    changed, after = run_pass(lambda m: rms_norm.run(m) * 10 + remove_unused.run(m), root_mean_square(is_output=True))
    assert changed == 11
    assert [o.name for o in after.graph.output] == ["out", "y"]


@pytest.mark.parametrize("options", [{"axes": (1,)}, {"axes": (-1, -2)}, {"read_twice": True}])
def test_other_norms_are_unchanged(options):
    proto = root_mean_square(**options)
    changed, after = run_pass(rms_norm.run, proto)
    assert changed == 0
    assert kinds(after) == kinds(proto)
