"""Rewrites that choose onnxruntime's kernels for an attention, against the attention written out in numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.small_graphs import model_of

from tformer_export.passes import fold_attention_scale, full_score_attention

HEADS, GROUPS, SIZE, SLOTS = 4, 2, 8, 16
WIDTH, NARROW = HEADS * SIZE, GROUPS * SIZE
SCALE = 0.3


def weights(**shapes):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attend(query, key, value, visible):
    """(heads, new, size) over (heads, slots, size), where a query sees as many slots as `visible` (new,) says."""
    found = query @ key.transpose(0, 2, 1) * SCALE
    found = np.where(np.arange(key.shape[1]) < visible[:, None], found, -np.inf)
    shares = np.exp(found - found.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ value


def heads(rows, count):
    """(new, count · size) → (count, new, size)."""
    return rows.reshape(len(rows), count, SIZE).swapaxes(0, 1)


def session(proto):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("query", ["product", "with bias", "shared bias", "shared weight", "computed"])
def test_the_scale_goes_into_what_makes_the_queries(query):
    held = weights(weight=(WIDTH, WIDTH), bias=(WIDTH,))
    biased, computed = query in ("with bias", "shared bias"), query == "computed"
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["q0" if biased or computed else "q"])]
    if biased:
        nodes.append(helper.make_node("Add", ["q0", "bias"], ["q"]))
    if computed:
        nodes.append(helper.make_node("Tanh", ["q0"], ["q"]))
    other = {"shared weight": ("MatMul", "weight"), "shared bias": ("Add", "bias")}.get(query)
    nodes.append(helper.make_node(*(("Neg", ["x"]) if other is None else (other[0], ["x", other[1]])), ["also"]))
    attributes = {"num_heads": HEADS, "scale": SCALE}
    nodes.append(helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", **attributes))
    inputs = {name: ["rows", None, WIDTH] for name in "xkv"}
    used = {name: array for name, array in held.items() if name == "weight" or biased}
    proto = model_of(nodes, inputs, {"y": None, "also": None}, used)
    after = ir.from_proto(proto)
    assert fold_attention_scale.run(after, "MultiHeadAttention") == 1
    assert fold_attention_scale.run(after, "MultiHeadAttention") == 0
    after = ir.to_proto(after)
    feeds = weights(x=(2, 3, WIDTH), k=(2, 5, WIDTH), v=(2, 5, WIDTH))
    found, also = session(after).run(["y", "also"], feeds)
    for row in range(2):
        made = feeds["x"][row] @ held["weight"]
        made = made + held["bias"] if biased else np.tanh(made) if computed else made
        operands = [heads(part, HEADS) for part in (made, feeds["k"][row], feeds["v"][row])]
        expected = attend(*operands, np.full(3, 5)).swapaxes(0, 1).reshape(3, WIDTH)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(also, session(proto).run(["also"], feeds)[0])
    operators = [node.op_type for node in after.graph.node]
    assert operators.count("Mul") == (computed or query == "shared weight")


def cached():
    """One attention over its own past."""
    operands = ["q", "k", "v", "past.0", "past.1", "last", "total"]
    attributes = {"num_heads": HEADS, "kv_num_heads": GROUPS, "scale": SCALE}
    outputs = dict.fromkeys(("y", "present.0", "present.1"))
    node = helper.make_node("GroupQueryAttention", operands, [*outputs], domain="com.microsoft", **attributes)
    inputs = {name: ["rows", "new", WIDTH if name == "q" else NARROW] for name in "qkv"}
    inputs |= {f"past.{i}": ["rows", GROUPS, "slots", SIZE] for i in range(2)}
    inputs |= {"last": (TensorProto.INT32, ["rows"]), "total": (TensorProto.INT32, [])}
    return model_of([node], inputs, outputs, {})


@pytest.mark.parametrize("most", [1 << 28, 400 * 4 * HEADS, 0])
def test_all_scores_at_once_or_in_blocks_is_the_same_attention_in_place(monkeypatch, most):
    """Room for any scores; for those of a step (2 · 1 · 16 a head) and not of the prompt (2 · 13 · 16); for none."""
    monkeypatch.setattr(full_score_attention, "MAX_SCORE_BYTES", most)
    after = ir.from_proto(cached())
    assert full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS + 1) == 1
    runs = session(ir.to_proto(after))
    assert ("If" in {node.op_type for node in after.graph}) == (most < 1 << 28)
    drawn = weights(q=(2, 14, WIDTH), k=(2, 14, NARROW), v=(2, 14, NARROW))
    caches = [np.zeros((2, GROUPS, SLOTS, SIZE), np.float32) for _ in range(2)]
    counts = np.array([13, 4])
    for new, ends in ((13, counts), (1, counts + 1)):
        at = np.minimum(np.maximum(ends - new, 0)[:, None] + np.arange(new), 13)
        given = {name: np.take_along_axis(array, at[..., None], 1) for name, array in drawn.items()}
        given |= {"last": (ends - 1).astype(np.int32), "total": np.array(ends.max(), np.int32)}
        if new > 1:
            given |= {name: array[:, :13] for name, array in drawn.items()}
        found = run_in_place(runs, given, caches)
        for row, end in enumerate(ends):
            own = min(new, end)
            positions = np.arange(end - own, end)
            query = heads(drawn["q"][row, positions], HEADS)
            past = [heads(drawn[name][row, :end], GROUPS).repeat(HEADS // GROUPS, 0) for name in "kv"]
            expected = attend(query, *past, positions + 1).swapaxes(0, 1).reshape(own, WIDTH)
            np.testing.assert_allclose(found[row, :own], expected, rtol=0, atol=1e-5)
    for cache, name in zip(caches, "kv", strict=True):
        np.testing.assert_array_equal(cache[0, :, :14], heads(drawn[name][0], GROUPS))


def run_in_place(runs, given, caches):
    io = runs.io_binding()
    for name, array in given.items():
        io.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
    io.bind_output("y")
    for i, cache in enumerate(caches):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        io.bind_ortvalue_input(f"past.{i}", value)
        io.bind_ortvalue_output(f"present.{i}", value)
    runs.run_with_iobinding(io)
    return io.get_outputs()[0].numpy()


def test_the_length_tells_which_kernels_a_file_has():
    after = ir.from_proto(cached())
    assert full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS) == 0
    assert ir.to_proto(after).graph.node == cached().graph.node
    full_score_attention.run(after, full_score_attention.MAX_SHORT_TOKENS + 1)
    (node,) = ir.to_proto(after).graph.node
    assert node.op_type == "GroupQueryAttention"
    assert node.input[full_score_attention.SINK]
    after = ir.from_proto(cached())
    full_score_attention.run(after, 4096)
    (choice,) = (node for node in ir.to_proto(after).graph.node if node.op_type == "If")
    sinks = [len(branch.g.node[0].input) for branch in choice.attribute]
    assert sinks == [full_score_attention.SINK + 1, full_score_attention.SINK + 1]
    assert sorted(bool(branch.g.node[0].input[full_score_attention.SINK]) for branch in choice.attribute) == [
        False,
        True,
    ]
