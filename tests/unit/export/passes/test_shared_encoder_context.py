"""Attention over a context that neighbouring rows share, against a copy of the context for each row."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.small_graphs import model_of

from tformer_export.passes import shared_encoder_context

HEADS, HEAD_SIZE = 2, 8
WIDTH = HEADS * HEAD_SIZE


def decoder(*extra_nodes, layers=2, bias="narrow"):
    """Return attention layers over context.k, context.v and context.bias, with additional nodes."""
    heads = ["rows", HEADS, "source", HEAD_SIZE]
    inputs = {"x": ["rows", "new", WIDTH], "context.k": heads, "context.v": heads}
    nodes, weights, value = [], {}, "x"
    if bias is not None:
        inputs["context.bias"] = ["rows", 1, 1 if bias == "narrow" else "new", "source"]
        nodes += [
            helper.make_node("Shape", ["x"], ["new"], start=1, end=2),
            helper.make_node("Shape", ["context.bias"], ["rows"], start=0, end=1),
            helper.make_node("Concat", ["rows", "one", "new", "one"], ["size"], axis=0),
            helper.make_node("Expand", ["context.bias", "size"], ["bias"]),
        ]
        weights["one"] = np.array([1])
    for i in range(layers):
        weights[f"w{i}"] = np.random.default_rng(i).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        operands = [f"q{i}", "context.k", "context.v", *([] if bias is None else ["", "", "bias"])]
        nodes += [
            helper.make_node("MatMul", [value, f"w{i}"], [f"q{i}"]),
            helper.make_node("MultiHeadAttention", operands, [f"a{i}"], domain="com.microsoft", num_heads=HEADS),
        ]
        value = f"a{i}"
    nodes += [helper.make_node("Relu", [value], ["y"]), *extra_nodes]
    outputs = {"y": ["rows", "new", WIDTH], **{name: None for node in extra_nodes for name in node.output}}
    return model_of(nodes, inputs, outputs, weights, "decode")


def run_pass(proto):
    after = ir.from_proto(proto)
    return shared_encoder_context.run(after), ir.to_proto(after)


def outputs(proto, rows, new, context):
    """Return the outputs for random inputs. Each row of the context is repeated up to `context` rows."""
    random = np.random.default_rng(3)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"x": random.standard_normal((rows, new, WIDTH))}
    for name, shape in (("k", (HEADS, 5, HEAD_SIZE)), ("v", (HEADS, 5, HEAD_SIZE)), ("bias", (1, 1, 5))):
        feeds[f"context.{name}"] = random.standard_normal((2, *shape))[:, ...]
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    for name in list(feeds):
        if name.startswith("context"):
            feeds[name] = np.repeat(feeds[name], context // 2, 0)
    names = {i.name for i in session.get_inputs()}
    return session.run(["y"], {name: array for name, array in feeds.items() if name in names})[0]


@pytest.mark.parametrize("bias", ["narrow", None])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("rows_per_context", [1, 2, 4])
def test_shared_context_matches_context_of_each_row(bias, new, rows_per_context):
    proto = decoder(bias=bias)
    expected = outputs(proto, 2 * rows_per_context, new, 2 * rows_per_context)
    changed, after = run_pass(proto)
    assert changed == 2
    onnx.checker.check_model(after)
    for context in {2, 2 * rows_per_context}:  # shared, and one copy for each row
        # Sums of 5 and of 8 products of numbers of about 1, in kernels that may add in another order.
        np.testing.assert_allclose(outputs(after, 2 * rows_per_context, new, context), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "reader",
    [
        helper.make_node("Neg", ["context.k"], ["z"]),
        helper.make_node("Shape", ["context.v"], ["z"]),  # its reader may use the number of rows
        helper.make_node("Shape", ["context.v"], ["z"], start=0, end=1),
    ],
    ids=["values", "shape", "rows"],
)
def test_context_with_other_readers_is_not_shared(reader):
    proto = decoder(reader)
    assert run_pass(proto)[0] == 0


def test_context_is_shared_if_other_sizes_are_read():
    assert run_pass(decoder(helper.make_node("Shape", ["context.v"], ["z"], start=2, end=3)))[0] == 2


def test_context_with_bias_per_position_is_not_shared():
    assert run_pass(decoder(bias="wide"))[0] == 0


def test_attention_that_is_a_graph_output_is_rewritten():
    proto = decoder()
    last = proto.graph.node[-2].output[0]
    proto.graph.output.append(helper.make_tensor_value_info(last, TensorProto.FLOAT, ["rows", "new", WIDTH]))
    changed, after = run_pass(proto)
    assert changed == 2
    assert [o.name for o in after.graph.output] == ["y", last]
    onnx.checker.check_model(after)
    np.testing.assert_allclose(outputs(after, 4, 3, 2), outputs(proto, 4, 3, 4), rtol=0, atol=1e-5)


def test_graph_without_context_is_unchanged():
    proto = decoder()
    for value in proto.graph.input:
        value.name = value.name.replace("context.", "past.")
    for node in proto.graph.node:
        node.input[:] = [name.replace("context.", "past.") for name in node.input]
    changed, after = run_pass(proto)
    assert changed == 0
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in proto.graph.node]
