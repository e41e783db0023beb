"""Each pass on a graph of its own: how many nodes before and after, and the same outputs in onnxruntime."""

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
    made = model_of(nodes, inputs, outputs, weights)
    onnx.checker.check_model(made)
    return made


def outputs(proto):
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    random = np.random.default_rng(3)
    feeds = {
        i.name: random.standard_normal([3 if isinstance(d, str) else d for d in i.shape]) for i in session.get_inputs()
    }
    return session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})


def through(run, proto):
    """(changed, the model after the pass), with its outputs compared to those before."""
    before = outputs(proto)
    after = ir.from_proto(proto)
    changed = run(after)
    written = ir.to_proto(after)
    for found, expected in zip(outputs(written), before, strict=True):
        # The same products of a row and a column, in kernels that may sum in another order: 8 terms of about 1.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    return changed, written


def kinds(proto):
    return [node.op_type for node in proto.graph.node]


def weight(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def projected(biases, widths=(WIDTH, WIDTH, WIDTH), bias_shape=None):
    """x → one product for each width, with a bias where `biases` says so."""
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
def test_three_projections_become_one(biases):
    changed, after = through(merge_projections.run, projected(biases))
    assert changed == 2
    assert kinds(after) == ["MatMul", *(["Add"] if any(biases) else []), "Split"]


def test_outputs_keep_their_names():
    """By which a file's outputs are bound; shapes and types are written with them."""
    proto = projected((True, False), (WIDTH, WIDTH))
    _, after = through(merge_projections.run, proto)
    assert list(after.graph.output) == list(proto.graph.output)


def test_projections_of_different_widths():
    changed, after = through(merge_projections.run, projected((True, True), (WIDTH, 3 * WIDTH)))
    assert changed == 1
    assert kinds(after) == ["MatMul", "Add", "Split"]


def test_a_bias_of_one_number_for_all_columns():
    through(merge_projections.run, projected((True, True), (WIDTH, WIDTH), bias_shape=(1,)))


def test_one_projection_stays():
    proto = projected((True,), (WIDTH,))
    changed, after = through(merge_projections.run, proto)
    assert changed == 0
    assert kinds(after) == kinds(proto)


def test_many_projections_of_one_value_stay_apart():
    changed, after = through(merge_projections.run, projected((False,) * 6, (WIDTH,) * 6))
    assert changed == 0
    assert kinds(after) == ["MatMul"] * 6


def test_a_product_that_is_read_before_its_bias_too():
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["p0"]),
        helper.make_node("Add", ["p0", "b0"], ["y0"]),
        helper.make_node("MatMul", ["x", "w1"], ["p1"]),
        helper.make_node("Add", ["p1", "b0"], ["biased"]),
        helper.make_node("Mul", ["biased", "p0"], ["y1"]),
    ]
    weights = {"w0": weight(0, WIDTH, WIDTH), "w1": weight(1, WIDTH, WIDTH), "b0": weight(2, WIDTH)}
    shape = ["rows", WIDTH]
    changed, after = through(merge_projections.run, model(nodes, {"x": shape}, {"y0": shape, "y1": shape}, weights))
    assert changed == 1
    assert kinds(after).count("MatMul") == 1


def test_a_product_that_is_an_output_itself():
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["y0"]),
        helper.make_node("Add", ["y0", "b0"], ["y1"]),
        helper.make_node("MatMul", ["x", "w1"], ["y2"]),
    ]
    weights = {"w0": weight(0, WIDTH, WIDTH), "w1": weight(1, WIDTH, WIDTH), "b0": weight(2, WIDTH)}
    shape = ["rows", WIDTH]
    proto = model(nodes, {"x": shape}, dict.fromkeys(("y0", "y1", "y2"), shape), weights)
    through(merge_projections.run, proto)


def test_reshapes_in_a_row_become_the_last():
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Reshape", ["split", "flat"], ["joined"]),
        helper.make_node("Relu", ["joined"], ["y"]),
    ]
    weights = {"heads": np.array([3, 5, 2, 4]), "flat": np.array([15, -1])}
    proto = model(nodes, {"x": [3, 5, WIDTH]}, {"y": [15, WIDTH]}, weights)
    changed, after = through(lambda m: drop_reshapes.run(m) * 10 + remove_unused.run(m), proto)
    assert changed == 11
    assert kinds(after) == ["Reshape", "Relu"]


def test_a_reshape_that_copies_a_size_keeps_its_operand():
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Reshape", ["split", "copy"], ["joined"]),
        helper.make_node("Relu", ["joined"], ["y"]),
    ]
    weights = {"heads": np.array([15, 2, 4]), "copy": np.array([0, -1])}
    proto = model(nodes, {"x": [3, 5, WIDTH]}, {"y": [15, WIDTH]}, weights)
    changed, after = through(drop_reshapes.run, proto)
    assert changed == 0
    assert kinds(after) == ["Reshape", "Reshape", "Relu"]


def test_a_reshape_to_the_same_shape_goes():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "same"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    proto = model(nodes, {"x": [3, WIDTH]}, {"y": [3, WIDTH]}, {"same": np.array([3, -1])})
    proto = onnx.shape_inference.infer_shapes(proto)
    changed, after = through(lambda m: drop_reshapes.run(m) * 10 + remove_unused.run(m), proto)
    assert changed == 11
    assert kinds(after) == ["Relu", "Neg"]


def test_strip_takes_out_what_tells_of_the_maker():
    proto = projected((True, True), (WIDTH, WIDTH))
    proto.producer_name, proto.doc_string = "pytorch", "at /home/me/model.py"
    entry = {"key": "pkg.torch.onnx.stack_trace", "value": "File /home/me/model.py"}
    proto.graph.doc_string = "secret"
    for holder in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        holder.metadata_props.add(**entry)
    for holder in proto.graph.initializer:
        holder.metadata_props.add(**entry)
    for node in proto.graph.node:
        node.doc_string = "secret"
    _, after = through(strip_debug_info.run, proto)
    content = after.SerializeToString()
    for text in (b"/home/me", b"secret", b"pkg.torch", b"pytorch"):
        assert text not in content
    assert kinds(after) == kinds(proto)


# -- tables that are output projections too -------------------------------------------------------------------------


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


def test_a_product_with_a_turned_table_reads_it_as_it_lies():
    changed, after = through(transposed_matmul.run, tied_model())
    assert changed == 1
    assert "MatMul" not in kinds(after)
    assert "FusedMatMul" in kinds(after)
    assert [o.name for o in after.graph.output] == ["y"]
    assert {o.domain: o.version for o in after.opset_import}["com.microsoft"] == 1


def test_a_table_that_is_turned_by_nothing_stays():
    changed, after = through(transposed_matmul.run, tied_model(perm=(0, 1)))
    assert changed == 0
    assert "FusedMatMul" not in kinds(after)


def test_a_tied_table_is_held_once():
    table = weight(0, WIDTH, WIDTH)
    nodes = [
        helper.make_node("Gather", ["table", "one"], ["row"], axis=0),
        helper.make_node("Add", ["x", "row"], ["sum"]),
        helper.make_node("MatMul", ["sum", "copy"], ["y"]),
    ]
    held = {"table": table, "one": np.array([1]), "copy": np.ascontiguousarray(table.T)}
    proto = model(nodes, {"x": ["rows", "time", WIDTH]}, {"y": ["rows", "time", WIDTH]}, held)
    changed, after = through(tie_embeddings.run, proto)
    assert changed == 1
    assert {tensor.name for tensor in after.graph.initializer} == {"table", "one"}
    assert through(transposed_matmul.run, after)[0] == 1


# -- root mean squares written out --------------------------------------------------------------------------------


def root_mean_square(
    square="Pow", divide="Reciprocal", weighed=True, axes=(-1,), epsilon=1e-5, read_twice=False, is_output=False
):
    weights = {"epsilon": np.float32(epsilon), "axes": np.array(axes), "two": np.float32(2), "w": weight(0, WIDTH)}
    nodes = [
        helper.make_node(square, ["x", "two" if square == "Pow" else "x"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "epsilon"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["root"]),
    ]
    normal = "normal" if weighed else "y"
    if divide == "Reciprocal":
        nodes += [helper.make_node("Reciprocal", ["root"], ["inverse"])]
        nodes += [helper.make_node("Mul", ["x", "inverse"], [normal])]
    else:
        nodes += [helper.make_node("Div", ["x", "root"], [normal])]
    nodes += [helper.make_node("Mul", ["w", "normal"], ["y"])] if weighed else []
    nodes += [helper.make_node("Neg", ["root"], ["z"])] if read_twice else []
    shape = ["rows", "time", WIDTH]
    nodes += [helper.make_node("Relu", ["y"], ["out"])]
    outputs = {"out": shape} | ({"z": ["rows", "time", 1]} if read_twice else {}) | ({"y": shape} if is_output else {})
    used = {name for node in nodes for name in node.input}
    return model(nodes, {"x": shape}, outputs, {n: np.asarray(w) for n, w in weights.items() if n in used})


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("divide", ["Reciprocal", "Div"])
@pytest.mark.parametrize("weighed", [True, False])
def test_a_root_mean_square_norm_is_one_operator(square, divide, weighed):
    changed, after = through(
        lambda m: rms_norm.run(m) * 10 + remove_unused.run(m), root_mean_square(square, divide, weighed, epsilon=0.1)
    )
    assert changed == 11
    assert kinds(after) == ["RMSNormalization", "Relu"]


def test_a_norm_that_is_an_output_itself():
    changed, after = through(lambda m: rms_norm.run(m) * 10 + remove_unused.run(m), root_mean_square(is_output=True))
    assert changed == 11
    assert [o.name for o in after.graph.output] == ["out", "y"]


@pytest.mark.parametrize("options", [{"axes": (1,)}, {"axes": (-1, -2)}, {"read_twice": True}])
def test_what_is_no_such_norm_stays(options):
    proto = root_mean_square(**options)
    changed, after = through(rms_norm.run, proto)
    assert changed == 0
    assert kinds(after) == kinds(proto)
