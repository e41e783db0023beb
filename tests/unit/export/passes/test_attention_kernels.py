"""Rewrites that choose the attention kernels of onnxruntime, against attention by numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.small_graphs import model_of

from tformer_export.passes import fold_attention_scale, full_score_attention

HEADS, GROUPS, HEAD_SIZE, SLOTS = 4, 2, 8, 16
WIDTH, CACHE_WIDTH = HEADS * HEAD_SIZE, GROUPS * HEAD_SIZE
SCALE = 0.3


def random_arrays(**shapes):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attend(query, key, value, visible):
    """Return attention (heads, new, size) over (heads, slots, size), where a query sees `visible` (new,) slots."""
    scores = query @ key.transpose(0, 2, 1) * SCALE
    scores = np.where(np.arange(key.shape[1]) < visible[:, None], scores, -np.inf)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True) @ value


def heads(rows, count):
    """Return rows (new, count · size) as (count, new, size)."""
    return rows.reshape(len(rows), count, HEAD_SIZE).swapaxes(0, 1)


def make_session(proto):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("query", ["product", "with bias", "shared bias", "shared weight", "computed"])
def test_scale_is_folded_into_query_projection(query):
    initializers = random_arrays(weight=(WIDTH, WIDTH), bias=(WIDTH,))
    biased, computed = query in ("with bias", "shared bias"), query == "computed"
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["q0" if biased or computed else "q"])]
    if biased:
        nodes.append(helper.make_node("Add", ["q0", "bias"], ["q"]))
    if computed:
        nodes.append(helper.make_node("Tanh", ["q0"], ["q"]))
    other_reader = {"shared weight": ("MatMul", "weight"), "shared bias": ("Add", "bias")}.get(query)
    nodes.append(
        helper.make_node(
            *(("Neg", ["x"]) if other_reader is None else (other_reader[0], ["x", other_reader[1]])), ["other_output"]
        )
    )
    attributes = {"num_heads": HEADS, "scale": SCALE}
    nodes.append(helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", **attributes))
    inputs = {name: ["rows", None, WIDTH] for name in "xkv"}
    used_weights = {name: array for name, array in initializers.items() if name == "weight" or biased}
    proto = model_of(nodes, inputs, {"y": None, "other_output": None}, used_weights)
    after = ir.from_proto(proto)
    assert fold_attention_scale.run(after, "MultiHeadAttention") == 1
    assert fold_attention_scale.run(after, "MultiHeadAttention") == 0
    after = ir.to_proto(after)
    feeds = random_arrays(x=(2, 3, WIDTH), k=(2, 5, WIDTH), v=(2, 5, WIDTH))
    actual, other_output = make_session(after).run(["y", "other_output"], feeds)
    for row in range(2):
        query_rows = feeds["x"][row] @ initializers["weight"]
        query_rows = query_rows + initializers["bias"] if biased else np.tanh(query_rows) if computed else query_rows
        operands = [heads(part, HEADS) for part in (query_rows, feeds["k"][row], feeds["v"][row])]
        expected = attend(*operands, np.full(3, 5)).swapaxes(0, 1).reshape(3, WIDTH)
        np.testing.assert_allclose(actual[row], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(other_output, make_session(proto).run(["other_output"], feeds)[0])
    operators = [node.op_type for node in after.graph.node]
    assert operators.count("Mul") == (computed or query == "shared weight")


def cached_attention_model():
    """Return a model of one attention over its own cache."""
    operands = ["q", "k", "v", "past.0", "past.1", "last", "total"]
    attributes = {"num_heads": HEADS, "kv_num_heads": GROUPS, "scale": SCALE}
    outputs = dict.fromkeys(("y", "present.0", "present.1"))
    node = helper.make_node("GroupQueryAttention", operands, [*outputs], domain="com.microsoft", **attributes)
    inputs = {name: ["rows", "new", WIDTH if name == "q" else CACHE_WIDTH] for name in "qkv"}
    inputs |= {f"past.{i}": ["rows", GROUPS, "slots", HEAD_SIZE] for i in range(2)}
    inputs |= {"last": (TensorProto.INT32, ["rows"]), "total": (TensorProto.INT32, [])}
    return model_of([node], inputs, outputs, {})


@pytest.mark.parametrize("max_score_bytes", [1 << 28, 400 * 4 * HEADS, 0])
def test_full_and_blocked_scores_match_attention_by_numpy(monkeypatch, max_score_bytes):
    """The limit allows all scores, only scores of a step (2 · 1 · 16 a head, the prompt has 2 · 13 · 16), or none."""
    monkeypatch.setattr(full_score_attention, "MAX_SCORE_BYTES", max_score_bytes)
    after = ir.from_proto(cached_attention_model())
    assert full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS + 1) == 1
    inference_session = make_session(ir.to_proto(after))
    assert ("If" in {node.op_type for node in after.graph}) == (max_score_bytes < 1 << 28)
    projections = random_arrays(q=(2, 14, WIDTH), k=(2, 14, CACHE_WIDTH), v=(2, 14, CACHE_WIDTH))
    caches = [np.zeros((2, GROUPS, SLOTS, HEAD_SIZE), np.float32) for _ in range(2)]
    counts = np.array([13, 4])
    for new, ends in ((13, counts), (1, counts + 1)):
        at = np.minimum(np.maximum(ends - new, 0)[:, None] + np.arange(new), 13)
        feeds = {name: np.take_along_axis(array, at[..., None], 1) for name, array in projections.items()}
        feeds |= {"last": (ends - 1).astype(np.int32), "total": np.array(ends.max(), np.int32)}
        if new > 1:
            feeds |= {name: array[:, :13] for name, array in projections.items()}
        actual = run_in_place(inference_session, feeds, caches)
        for row, end in enumerate(ends):
            num_rows = min(new, end)
            positions = np.arange(end - num_rows, end)
            query = heads(projections["q"][row, positions], HEADS)
            past = [heads(projections[name][row, :end], GROUPS).repeat(HEADS // GROUPS, 0) for name in "kv"]
            expected = attend(query, *past, positions + 1).swapaxes(0, 1).reshape(num_rows, WIDTH)
            np.testing.assert_allclose(actual[row, :num_rows], expected, rtol=0, atol=1e-5)
    for cache, name in zip(caches, "kv", strict=True):
        np.testing.assert_array_equal(cache[0, :, :14], heads(projections[name][0], GROUPS))


def run_in_place(inference_session, feeds, caches):
    io = inference_session.io_binding()
    for name, array in feeds.items():
        io.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
    io.bind_output("y")
    for i, cache in enumerate(caches):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        io.bind_ortvalue_input(f"past.{i}", value)
        io.bind_ortvalue_output(f"present.{i}", value)
    inference_session.run_with_iobinding(io)
    return io.get_outputs()[0].numpy()


def test_max_length_decides_the_kernels():
    after = ir.from_proto(cached_attention_model())
    assert full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS) == 0
    assert ir.to_proto(after).graph.node == cached_attention_model().graph.node
    full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS + 1)
    (node,) = ir.to_proto(after).graph.node
    assert node.op_type == "GroupQueryAttention"
    assert node.input[full_score_attention.SINK]
    after = ir.from_proto(cached_attention_model())
    full_score_attention.run(after, 4096)
    (choice,) = (node for node in ir.to_proto(after).graph.node if node.op_type == "If")
    sinks = [len(branch.g.node[0].input) for branch in choice.attribute]
    assert sinks == [full_score_attention.SINK + 1, full_score_attention.SINK + 1]
    assert sorted(bool(branch.g.node[0].input[full_score_attention.SINK]) for branch in choice.attribute) == [
        False,
        True,
    ]
