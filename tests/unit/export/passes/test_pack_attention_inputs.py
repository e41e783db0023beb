"""Attention takes the whole result of a projection that is split for it, with the results of PyTorch's attention."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from support.small_graphs import model_of

from tformer_export.passes import fold_attention_scale, pack_attention_inputs, remove_unused, run_passes
from tformer_export.passes.column_blocks import ColumnBlock, find_column_block

HEADS, GROUPS, SIZE, INNER = 4, 2, 8, 24
Q, KV = HEADS * SIZE, GROUPS * SIZE
ALL = Q + 2 * KV
ROWS, LENGTH = 2, 5
SCALE = 0.3
TOLERANCE = 1e-5  # of averages of numbers of about 5, by float32 scores


def split(source, results, sizes=None, axis=-1):
    """Return a Split, with sizes in a constant or in equal parts."""
    inputs = [source] if sizes is None else [source, sizes]
    count = {"num_outputs": len(results)} if sizes is None else {}
    return helper.make_node("Split", inputs, results, axis=axis, **count)


def cut(source, result, begin, end, axis="last"):
    return helper.make_node("Slice", [source, begin, end, axis], [result])


SIZES = {"sizes": [Q, KV, KV], "outer": [Q, 2 * KV], "pair": [Q + KV, KV], "inner": [Q, KV], "others": [KV, Q, KV]}
NUMBERS = {
    "zero": 0,
    "last": -1,
    "third": 2,
    "keys": Q,
    "values": Q + KV,
    "end": ALL,
    "most": 2**63 - 1,
    "tail": -KV,
    "one": 1,
    "kv": KV,
    "one more": KV + 1,
}
PARTS = {
    "split": [split("p", "qkv", "sizes")],
    "split of the third axis": [split("p", "qkv", "sizes", axis=2)],
    "keys and values split later": [split("p", ["q", "rest"], "outer"), split("rest", "kv")],
    "queries and keys split later": [split("p", ["qk", "v"], "pair"), split("qk", ["q", "k"], "inner")],
    "slices": [cut("p", "q", "zero", "keys"), cut("p", "k", "keys", "values", "third"), cut("p", "v", "tail", "most")],
    "split and slices": [
        split("p", ["q", "rest"], "outer"),
        cut("p", "k", "keys", "values"),
        cut("p", "v", "values", "end"),
    ],
}


def attention_model(parts, outputs=(), groups=GROUPS, width=ALL, product_width=None, sizes=SIZES):
    """Return a model of the causal attention of a projection of x.

    outputs: names of further ones. product_width: that of the bias by default. sizes: name → sizes of a split.
    """
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((INNER, product_width or width)) / 3, "b": random.standard_normal(width)}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    weights |= {name: np.array(widths) for name, widths in sizes.items()}
    weights |= {name: np.array([number]) for name, number in NUMBERS.items()}
    weights["ends"], weights["length"] = np.full(ROWS, LENGTH - 1, np.int32), np.array(LENGTH, np.int32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["p"]),
        *parts,
        helper.make_node(
            "GroupQueryAttention", ["q", "k", "v", "", "", "ends", "length"], ["y", "present.0", "present.1"],
            domain="com.microsoft", num_heads=HEADS, kv_num_heads=groups, scale=SCALE,
        ),
    ]  # fmt: skip
    proto = model_of(nodes, {"x": ["rows", "new", INNER]}, dict.fromkeys(("y", *outputs)), weights)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def run(model, x, outputs=("y",)):
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run([*outputs], {"x": x})


def drawn(positions=LENGTH):
    return np.random.default_rng(1).standard_normal((ROWS, positions, INNER)).astype(np.float32)


def expected_attention(x, columns):
    """Return PyTorch's attention of a projection. columns: those of queries, keys and values."""
    random = np.random.default_rng(0)
    width = max(block.stop for block in columns)
    weight, bias = random.standard_normal((INNER, width)) / 3, random.standard_normal(width)
    projected = torch.from_numpy(x @ weight.astype(np.float32) + bias.astype(np.float32))
    query, key, value = (projected[..., block].unflatten(-1, (-1, SIZE)).transpose(1, 2) for block in columns)
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
    )
    return result.transpose(1, 2).flatten(2).numpy()


IN_ORDER = slice(0, Q), slice(Q, Q + KV), slice(Q + KV, ALL)


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_attention_takes_the_projection(name, folds):
    model = attention_model(PARTS[name])
    if folds:
        assert fold_attention_scale.run(model) == 1
        assert fold_attention_scale.run(model) == 0
    is_scaled_apart = folds and name == "queries and keys split later"
    assert pack_attention_inputs.run(model) == (not is_scaled_apart)
    remove_unused.run(model)
    expected = expected_attention(drawn(), IN_ORDER)
    np.testing.assert_allclose(run(model, drawn())[0], expected, rtol=0, atol=TOLERANCE)
    if not is_scaled_apart:
        assert [node.op_type for node in model.graph] == ["MatMul", "Add", "GroupQueryAttention"]


def test_projection_that_is_merged_with_another_is_packed():
    """Such as one of a feed-forward layer beside the attention. One split remains, between the two projections."""
    parts = [*PARTS["split"], helper.make_node("MatMul", ["x", "w"], ["other"])]
    x, model = drawn(), attention_model(parts, ["other"])
    expected = run(model, x, ["y", "other"])
    counts = run_passes(model, LENGTH)
    assert (counts["pack_attention_inputs"], counts["merge_projections"]) == (1, 1)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Split", "GroupQueryAttention"]
    for actual, wanted in zip(run(model, x, ["y", "other"]), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE)


OTHERS = {
    "another order": [split("p", ["k", "q", "v"], "others")],
    "keys after values": [split("p", ["q", "v", "k"], "sizes")],
    "queries that are computed": [split("p", ["q0", "k", "v"], "sizes"), helper.make_node("Neg", ["q0"], ["q"])],
    "keys of another value": [
        split("p", ["q", "k0", "v"], "sizes"),
        helper.make_node("Add", ["x", "x"], ["doubled"]),
        cut("doubled", "k", "zero", "kv"),
    ],
    "keys of the same columns of another value": [
        helper.make_node("Neg", ["p"], ["negative"]),
        split("p", ["q", "k0", "v"], "sizes"),
        cut("negative", "k", "keys", "values"),
    ],
    "a column twice": [cut("p", "q", "zero", "keys"), cut("p", "k", "one", "one more"), cut("p", "v", "values", "end")],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_parts_are_unchanged(name):
    model = attention_model(OTHERS[name])
    before = run(model, drawn())
    kinds = [node.op_type for node in model.graph]
    assert pack_attention_inputs.run(model) == 0
    assert [node.op_type for node in model.graph] == kinds
    np.testing.assert_array_equal(run(model, drawn())[0], before[0])


def test_parts_along_another_axis_are_unchanged():
    """Each has all columns, of a third of the positions."""
    model = attention_model([split("p", "qkv", axis=1)], groups=HEADS, width=Q)
    before = run(model, drawn(3 * LENGTH))
    assert pack_attention_inputs.run(model) == 0
    np.testing.assert_array_equal(run(model, drawn(3 * LENGTH))[0], before[0])


@pytest.mark.parametrize("place", range(4))
def test_projection_with_more_columns_is_unchanged(place):
    """They are before the queries, between the parts, or behind the values."""
    sizes, names = [Q, KV, KV], ["q", "k", "v"]
    sizes.insert(place, SIZE)
    names.insert(place, "more")
    model = attention_model([split("p", names, "with more")], width=ALL + SIZE, sizes={"with more": sizes})
    assert pack_attention_inputs.run(model) == 0


@pytest.mark.parametrize("part", ["q", "k", "p"])
def test_part_that_something_else_reads_stays(part):
    """Packing leaves it alone. A scale in the weights would change it, so that a product scales the queries."""
    parts = [*PARTS["split"], helper.make_node("Neg", [part], ["other"])]
    x, model = drawn(), attention_model(parts, ["other"])
    expected = run(model, x, ["y", "other"])
    packed = attention_model(parts, ["other"])
    assert pack_attention_inputs.run(packed) == 1
    folded = attention_model(parts, ["other"])
    assert fold_attention_scale.run(folded) == 1
    assert pack_attention_inputs.run(folded) == (part == "k")
    assert [node.op_type for node in folded.graph].count("Mul") == (part != "k")
    for model in (packed, folded):
        remove_unused.run(model)
        for actual, wanted in zip(run(model, x, ["y", "other"]), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE)


def test_bias_that_is_wider_than_its_product_stays():
    """All columns of the sum have the one column of the product, which cannot have two scales."""
    x, model = drawn(), attention_model(PARTS["split"], product_width=1)
    expected = run(model, x)
    assert fold_attention_scale.run(model) == 1
    np.testing.assert_allclose(run(model, x)[0], expected[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("output", ["q", "p", "product"])
def test_output_that_the_queries_are_computed_from_stays(output):
    x, model = drawn(), attention_model(PARTS["split"], [output])
    expected = run(model, x, ["y", output])
    assert fold_attention_scale.run(model) == 1
    for actual, wanted in zip(run(model, x, ["y", output]), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE)


def test_value_with_fewer_columns_than_come_before_the_queries_stays():
    """It is computed from all columns of the projection, and its own columns are not those of the queries."""
    parts = [split("p", ["k", "q", "v"], "others"), helper.make_node("ReduceSum", ["p", "last"], ["other"])]
    x, model = drawn(), attention_model(parts, ["other"])
    expected = run(model, x, ["y", "other"])
    assert fold_attention_scale.run(model) == 1
    for actual, wanted in zip(run(model, x, ["y", "other"]), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=TOLERANCE)


def test_scale_of_packed_inputs_stays():
    """It would scale the keys and the values too."""
    model = attention_model(PARTS["split"])
    assert pack_attention_inputs.run(model) == 1
    assert fold_attention_scale.run(model) == 0


@pytest.mark.parametrize(
    ("node", "blocks"),
    [
        (split("x", "ab", "even"), [(0, 3), (3, 6)]),
        (split("x", "ab"), [(0, 3), (3, 6)]),
        (split("x", "ab", axis=0), [None, None]),
        (cut("x", "a", "minus", "most"), [(4, 6)]),
        (cut("x", "a", "one", "two"), [(1, 2)]),
        (cut("x", "a", "two", "one"), [None]),
        (helper.make_node("Slice", ["x", "zero", "most", "last", "two"], ["a"]), [None]),
        (helper.make_node("Slice", ["x", "zero", "y", "last"], ["a"]), [None]),
        (cut("x", "a", "zero", "one", "zero"), [None]),
    ],
)
def test_columns_of_splits_and_slices(node, blocks):
    weights = {
        name: np.array([n]) for name, n in {"minus": -2, "most": 2**63 - 1, "one": 1, "two": 2, "zero": 0}.items()
    }
    weights |= {"last": np.array([-1]), "even": np.array([3, 3])}
    ports = {"x": ["rows", 6], "y": (TensorProto.INT64, [1])}
    model = ir.from_proto(model_of([node], ports, dict.fromkeys(node.output), weights))
    (made,) = model.graph
    x = model.graph.inputs[0]
    for value, bounds in zip(made.outputs, blocks, strict=True):
        assert find_column_block(value) == (None if bounds is None else ColumnBlock(x, *bounds))
