"""int8 and int4 products: the error of a weight, the rewritten graph and matrices that two operators share,
against onnxruntime on the float graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper, numpy_helper
from support.small_graphs import model_of

from tformer_export.common.onnx_writer import collect_products
from tformer_export.quantize import StaticScale, quantize_weights
from tformer_export.quantize.rewrite import SMALL_BATCH_LIMIT
from tformer_export.quantize.rounding.round_nearest import Blocks, expand, in_blocks, int4_blocks, pack, per_column

floats = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (6, 31)])
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=floats))
def test_weight_error_is_at_most_half_a_step(bits, most, weight):
    quantized, scale = per_column(weight, bits)
    assert np.abs(quantized.astype(int)).max() <= most
    assert quantized.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == weight.shape[1:]
    assert (scale > 0).all()
    error = np.abs(weight.astype(np.float64) - quantized.astype(np.float64) * scale)
    # Dividing by the scale and the scale itself each round by 2⁻²⁴ of numbers up to 127 steps.
    assert (error <= scale * (0.5 + 2 * 127 * 2.0**-24)).all()
    assert not quantized[:, ~weight.any(0)].any()


def test_each_column_has_its_own_scale():
    quantized, scale = per_column(np.array([[1.0, 100.0], [-0.5, 25.0]], np.float32))
    np.testing.assert_allclose(scale, [1 / 127, 125 / 128], rtol=1e-6)  # the sum of a pair is at most 128 steps
    assert quantized.tolist() == [[127, 102], [-64, 26]]  # halves go to the even neighbour


VOCABULARY, WIDTH = 60, 32


def make_tied_model(transposed, steps=1):
    """Return a model that uses one matrix as embedding and as output projection: by transB of Gemm, or transposed."""
    table = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    weights = {"table": table, "bias": np.arange(VOCABULARY, dtype=np.float32), "flat": np.array([-1, WIDTH])}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Reshape", ["rows", "flat"], ["x"]),
    ]
    if transposed:
        nodes.append(helper.make_node("Gemm", ["x", "table", "bias"], ["y"], transB=1))
    else:
        weights["columns"] = np.ascontiguousarray(table.T)
        nodes += [helper.make_node("MatMul", ["x", "columns"], ["p"]), helper.make_node("Add", ["p", "bias"], ["y"])]
    ports = {"ids": (TensorProto.INT64, ["batch", "time"])}, {"y": ["rows", VOCABULARY]}
    return model_of(nodes, *ports, weights), table


@pytest.mark.parametrize("transposed", [True, False])
def test_tied_table_is_stored_once(transposed):
    proto, table = make_tied_model(transposed)
    model = ir.from_proto(proto)
    assert quantize_weights(model).count == 2
    quantized = ir.to_proto(model)
    int8_tensors = [t for t in quantized.graph.initializer if t.data_type == TensorProto.INT8]
    assert [list(t.dims) for t in int8_tensors] == [[VOCABULARY, WIDTH]]
    assert not any(
        len(t.dims) == 2 and np.prod(t.dims) > VOCABULARY for t in quantized.graph.initializer if t not in int8_tensors
    )
    ids = np.array([[3, 59, 0], [7, 7, 8]])
    (actual,) = onnxruntime.InferenceSession(quantized.SerializeToString()).run(None, {"ids": ids})
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": ids})
    # x · w has WIDTH terms. Each operand errs by half a step of 1/127 of its maximum: the table once as embedding and
    # once as projection, and the activations.
    largest = np.abs(table).max()
    bound = WIDTH * (3 * 0.5 * largest / 127) * largest
    assert 0 < np.abs(actual - expected).max() < bound / 4  # errors have either sign and rarely add up
    assert (actual.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("width", [32, 40, 7])  # 40 and 7 are padded to blocks of 16
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2), (2, 0)])
def test_rows_of_table_in_4_bits_are_those_of_its_integers(shape, width):
    random = np.random.default_rng(0)
    table = random.standard_normal((200, width)).astype(np.float32)
    ids_shape = [f"axis{i}" for i in range(len(shape))]
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    model = ir.from_proto(
        model_of(nodes, {"ids": (TensorProto.INT64, ids_shape)}, {"y": [*ids_shape, width]}, {"table": table})
    )
    assert quantize_weights(model, {"table": 4}).tables == 1
    ids = random.integers(-200, 200, shape)
    q, codes, scale = in_blocks(table.T, int4_blocks(width, "throughput"))
    expected = (expand(q, codes, 16) * scale).T[ids]
    actual = run(ir.to_proto(model), ids)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("optimize_for", ["throughput", "latency"])
@pytest.mark.parametrize("transposed", [True, False])
def test_tied_table_in_4_bits_is_stored_once(transposed, optimize_for):
    proto, table = make_tied_model(transposed)
    model = ir.from_proto(proto)
    for node in model.graph:
        node.name = node.name or node.op_type
    product = "Gemm" if transposed else "MatMul"
    parts = quantize_weights(model, {"table": 4, product: 4}, optimize_for, "ids")
    assert (parts.count, parts.products[product].bits) == (2, 4)
    quantized = ir.to_proto(model)
    stored = [numpy_helper.to_array(t) for t in quantized.graph.initializer]
    assert [array.nbytes for array in stored if array.nbytes >= VOCABULARY * WIDTH // 2] == [VOCABULARY * WIDTH // 2]
    blocks = int4_blocks(WIDTH, optimize_for)
    q, codes, scale = in_blocks(table.T, blocks)
    rounded, _ = make_tied_model(transposed)
    for tensor in rounded.graph.initializer:
        if tensor.name in ("table", "columns"):
            weight = (expand(q, codes, blocks.rows) * scale).astype(np.float32)
            weight = np.ascontiguousarray(weight.T) if tensor.name == "table" else weight
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    ids = np.array([[3, 59, 0], [7, 7, 8]])
    expected, actual = run(rounded, ids), run(quantized, ids)
    # Activations alone are rounded, by half a step of 1/127 of a row's maximum at most; their errors rarely add up.
    assert 0 < np.abs(actual - expected).max() < 0.01 * np.ptp(expected)


def test_equal_numbers_of_different_shape_are_separate_matrices():
    """Two projections that start as zeros, up and down, are an example."""
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], name="p1"),
        helper.make_node("MatMul", ["h", "down"], ["y"], name="p2"),
    ]
    initializers = {"up": np.zeros((64, 32), np.float32), "down": np.zeros((32, 64), np.float32)}
    model = ir.from_proto(model_of(nodes, {"x": ["rows", 64]}, {"y": ["rows", 64]}, initializers))
    quantization = quantize_weights(model)
    assert [(p.inner, p.columns) for p in quantization.products.values()] == [(64, 32), (32, 64)]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    assert not session.run(None, {"x": np.ones((3, 64), np.float32)})[0].any()


def test_small_matrices_are_not_quantized():
    weight = np.eye(8, dtype=np.float32)
    shape = ["rows", 8]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = ir.from_proto(model_of(nodes, {"x": shape}, {"y": shape}, {"w": weight}))
    assert quantize_weights(model).count == 0
    assert [node.op_type for node in model.graph] == ["MatMul"]


# -- blocks of 4 bits, and the two forms of a product -----------------------------------------------------------------

matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 70), st.integers(1, 5)), elements=floats)


@given(matrices, st.sampled_from([16, 32]), st.booleans())
def test_int4_weight_error_is_at_most_half_a_step_plus_rounding_of_the_steps(weight, rows, has_whole_zeros):
    blocks = Blocks(rows, has_whole_zeros)
    q, codes, scale = in_blocks(weight, blocks)
    expanded = expand(q, codes, rows)
    m = codes % 8 + 1.0
    # The 15 steps of m are too short by half a unit each at most. They may lie too high or low by half of a unit of z,
    # and by the part that ⌊m · z / 2⌋ cuts off. A number within them errs by half of m.
    missed = 15 / 2 + m * (2 if has_whole_zeros else 1) / 4 + 0.5
    error = np.abs(weight.astype(np.float64) - expanded.astype(np.float64) * scale)
    bound = np.repeat(missed + m / 2, rows, 0)[: len(q)]
    assert (error <= scale * (bound + 1e-3) * (1 + 1e-5)).all()


@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([16, 32]), st.sampled_from([4, 8]))
def test_packed_integers_can_be_unpacked(inner, columns, block, bits):
    half = 1 << bits - 1
    lowest, kind = (0, np.uint8) if bits == 4 else (-127, np.int8)
    q = np.random.default_rng(inner).integers(lowest, lowest + 2 * half - (bits == 8), (inner, columns)).astype(kind)
    packed = pack(q, bits, block)
    blocks = -(-inner // block)
    assert packed.shape == (columns, blocks, block * bits // 8)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], -1)
    unpacked = packed.reshape(columns, blocks * block).astype(int)
    assert (q.astype(int) + (0 if bits == 4 else half) == unpacked[:, :inner].T).all()
    assert (unpacked[:, inner:] == half).all()


def projection(inner, relu=False, between="Tanh", name="graph"):
    """Return ids (batch, new) → embedding → hidden layer → logits, with biases."""
    random = np.random.default_rng(inner)
    initializers = {
        "table": random.standard_normal((VOCABULARY, inner)),
        "w1": random.standard_normal((inner, 72)),
        "b1": random.standard_normal(72),
        "w2": random.standard_normal((72, VOCABULARY)),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w1"], ["p"], name="up"),
        helper.make_node("Add", ["p", "b1"], ["h"]),
        helper.make_node("Relu" if relu else between, ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["y"], name="out"),
    ]
    ports = {"ids": (TensorProto.INT64, ["batch", "new"])}, {"y": ["batch", "new", VOCABULARY]}
    return model_of(nodes, *ports, {name: array.astype(np.float32) for name, array in initializers.items()}, name)


def run(proto, ids):
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": ids})[0]


def dequantize(bits, inner):
    """Return the model with the float weights that the integers represent."""
    proto = projection(inner)
    for tensor in proto.graph.initializer:
        weight = numpy_helper.to_array(tensor)
        if tensor.name == "table":
            q, scale = per_column(weight.T)
            weight = (q * scale).T
        elif weight.ndim == 2 and bits != 4:
            q, scale = per_column(weight, bits)
            weight = q * scale
        elif weight.ndim == 2:
            blocks = int4_blocks(len(weight), "latency")
            q, codes, scale = in_blocks(weight, blocks)
            weight = expand(q, codes, blocks.rows) * scale
        tensor.CopyFrom(numpy_helper.from_array(weight.astype(np.float32), tensor.name))
    return proto


@pytest.mark.parametrize("inner", [16, 40, 64, 100])  # 40 and 100 are padded to blocks; the second product has 72
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_both_forms_match_dequantized_model_up_to_rounding_of_activations(bits, inner):
    model = ir.from_proto(projection(inner))
    quantization = quantize_weights(model, bits, "latency", "ids")
    assert {name: (p.bits, p.few) for name, p in quantization.products.items()} == dict.fromkeys(
        ("up", "out"), (bits, True)
    )
    quantized = ir.to_proto(model)
    ids = np.array([[3], [59], [0], [7], [8]])
    expected = run(dequantize(bits, inner), ids)
    (small_batch_limit,) = {SMALL_BATCH_LIMIT[bits]}
    large_batch, single_rows = run(quantized, ids), np.concatenate([run(quantized, ids[i : i + 1]) for i in range(5)])
    small_batch = run(quantized, ids[:small_batch_limit])
    # Rounded to 1/127 of their maximum, activations err by 0.3 % of it (rms) and so does, relatively, each of two
    # products in a row: 2 % are seven times that.
    for actual in (large_batch, single_rows):
        assert 0 < np.abs(actual - expected).max() < 0.02 * np.ptp(expected)
    assert not np.array_equal(large_batch, single_rows)
    assert np.abs(small_batch - single_rows[:small_batch_limit]).max() < 0.02 * np.ptp(expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_small_batch_limit_counts_time_steps_of_a_series(bits):
    """Rows within the limit use the form for small batches, which also computes a single row."""
    weight = np.random.default_rng(0).standard_normal((7, 160)).astype(np.float32)
    output_weight = np.random.default_rng(1).standard_normal((160, 7)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="in"),
        helper.make_node("Tanh", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "v"], ["y"], name="out"),
    ]
    shape = ["batch", "new", 7]
    proto = model_of(nodes, {"x": shape}, {"y": shape}, {"w": weight, "v": output_weight})
    model = ir.from_proto(proto)
    quantization = quantize_weights(model, bits, "latency", "x")
    assert quantization.small_batch_limit == SMALL_BATCH_LIMIT[bits]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.random.default_rng(2).standard_normal((1, 5, 7)).astype(np.float32)
    single_steps = np.concatenate([session.run(None, {"x": x[:, i : i + 1]})[0] for i in range(5)], 1)
    for batch, new in ((1, SMALL_BATCH_LIMIT[bits]), (SMALL_BATCH_LIMIT[bits], 1)):
        (within,) = session.run(None, {"x": x[:, : SMALL_BATCH_LIMIT[bits]].reshape(batch, new, 7)})
        np.testing.assert_allclose(within.reshape(-1, 7), single_steps[0, : SMALL_BATCH_LIMIT[bits]], atol=1e-5)
    (beyond,) = session.run(None, {"x": x})
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    assert 1e-4 < np.abs(beyond - single_steps).max() < 0.1 * np.ptp(expected)


BIASES = {"one number": [1], "vector": [72], "scalar": [], "row": [1, 72]}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("operator", ["Add", "Gemm"])
@pytest.mark.parametrize("form", ["small batch", "fixed", "rows"])
def test_bias_may_have_any_broadcastable_shape(form, operator, shape):
    random = np.random.default_rng(0)
    bias = (5 + random.standard_normal(shape)).astype(np.float32)
    initializers = {"w": random.standard_normal((64, 72)).astype(np.float32), "b": bias, "flat": np.array([-1, 64])}
    nodes = [helper.make_node("Reshape", ["x", "flat"], ["rows"])]
    if operator == "Gemm":
        nodes.append(helper.make_node("Gemm", ["rows", "w", "b"], ["y"], name="p"))
    else:
        nodes += [
            helper.make_node("MatMul", ["rows", "w"], ["m"], name="p"),
            helper.make_node("Add", ["b", "m"], ["y"]),
        ]
    proto = model_of(nodes, {"x": ["batch", "new", 64]}, {"y": ["rows", 72]}, initializers)
    model = ir.from_proto(proto)
    fixed = {"p": StaticScale.between(-5, 5)} if form == "fixed" else {}
    quantize_weights(
        model, 8, "latency" if form == "small batch" else "throughput", "x", on_cpu=True, static_scales=fixed
    )
    kind = {"small batch": "MatMulNBits", "fixed": "MatMulIntegerToFloat", "rows": "MatMulInteger"}[form]
    assert kind in {node.op_type for node in model.graph.all_nodes()}
    x = random.standard_normal((1, 2, 64)).astype(np.float32)
    runs = (
        onnxruntime.InferenceSession(p.SerializeToString()).run(None, {"x": x}) for p in (ir.to_proto(model), proto)
    )
    (actual,), (expected,) = runs
    assert 0 < np.abs(actual - expected).max() < 0.03 * np.ptp(expected)


def test_throughput_has_one_form_and_rows_are_independent():
    model = ir.from_proto(projection(64, relu=True))
    quantization = quantize_weights(model, 4, "throughput", "ids")
    assert not any(product.few for product in quantization.products.values())
    quantized = ir.to_proto(model)
    assert {"If", "MatMulNBits", "Relu"}.isdisjoint({n.op_type for n in quantized.graph.node} - {"Relu"})
    ids = np.array([[3], [59], [0], [7], [8]])
    batch = run(quantized, ids)
    assert all(np.array_equal(run(quantized, ids[i : i + 1])[0], batch[i]) for i in range(5))


def test_activations_after_relu_use_255_steps():
    model = ir.from_proto(projection(64, relu=True))
    float_model = ir.to_proto(model)
    quantize_weights(model)
    ids = np.arange(VOCABULARY)[:, None]
    expected, actual = run(float_model, ids), run(ir.to_proto(model), ids)
    assert np.abs(actual - expected).max() < 0.02 * np.ptp(expected)
    assert any(p.scaling.step == np.float32(1 / 255) for p in collect_products(model).products.values())


@pytest.mark.parametrize("between", ["Gelu", "Relu", "Tanh"])
@pytest.mark.parametrize(("on_cpu", "name"), [(False, "graph"), (True, "graph"), (True, "encode")])
def test_cpu_forms_match_float_model(between, on_cpu, name):
    """After a Gelu the step follows from its maximum, or from the 0.17 that it may be below zero.

    Table and weights err by half a step of 1/128 of the largest pair, activations of 1/127: about 0.4 % (rms) each, and
    0.9 % for five in a row. The largest of 3,600 errors is below four times that."""
    proto = projection(64, between=between, name=name)
    model = ir.from_proto(proto)
    quantize_weights(model, on_cpu=on_cpu)
    quantized = ir.to_proto(model)
    kinds = [node.op_type for node in quantized.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 2 * (name == "encode")
    assert kinds.count("Reciprocal") == 2 * (not on_cpu)
    assert kinds.count("Abs") == {"Gelu": 1, "Relu": 1, "Tanh": 2}[between]
    ids = np.arange(VOCABULARY)[:, None]
    expected, actual = run(proto, ids), run(quantized, ids)
    assert 0 < np.abs(actual - expected).max() < 0.036 * np.ptp(expected)
    assert all(np.array_equal(run(quantized, ids[i : i + 1])[0], actual[i]) for i in range(5))


def test_row_of_zeros_returns_the_bias():
    proto = projection(64)
    table = next(t for t in proto.graph.initializer if t.name == "table")
    rows = numpy_helper.to_array(table).copy()
    rows[5] = 0
    table.CopyFrom(numpy_helper.from_array(rows, "table"))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", "new", 72]))
    model = ir.from_proto(proto)
    quantize_weights(model, on_cpu=True)
    bias = next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "b1")
    assert np.array_equal(run(ir.to_proto(model), np.array([[5]]))[0, 0], bias)


def test_bits_are_chosen_by_product_name():
    model = ir.from_proto(projection(64))
    quantization = quantize_weights(model, {"up": 4, "out": 16}, "latency", "ids")
    assert {name: product.bits for name, product in quantization.products.items()} == {"up": 4}
    model = ir.from_proto(projection(64))
    assert {n: p.bits for n, p in quantize_weights(model, lambda name: 4 if name == "out" else 8).products.items()} == {
        "up": 8,
        "out": 4,
    }


@pytest.mark.parametrize("transposed", [True, False])
def test_tied_table_keeps_8_bits_and_is_stored_once_in_two_forms(transposed):
    proto, _ = make_tied_model(transposed)
    model = ir.from_proto(proto)
    quantization = quantize_weights(model, 4, "latency", "ids")
    assert [(p.bits, p.few) for p in quantization.products.values()] == [(8, True)]
    quantized = ir.to_proto(model)
    integer_tensors = [
        t for t in quantized.graph.initializer if t.data_type in (TensorProto.INT8, TensorProto.UINT8) and t.dims
    ]
    assert [list(t.dims) for t in integer_tensors if np.prod(t.dims) > VOCABULARY] == [[VOCABULARY, WIDTH]]
    ids = np.array([[3, 59, 0], [7, 7, 8]])
    expected = run(proto, ids)
    batch, single_ids = run(quantized, ids), np.concatenate([run(quantized, ids[:, i : i + 1]) for i in range(3)])
    for actual, reference in (
        (batch, expected),
        (single_ids, expected.reshape(2, 3, -1).swapaxes(0, 1).reshape(6, -1)),
    ):
        assert np.abs(actual - reference).max() < 0.02 * np.ptp(expected)


def test_empty_group_of_rows_is_computed():
    """A mixture of experts leaves some experts without rows."""
    weight = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["one", "other"], axis=0),
        helper.make_node("MatMul", ["one", "w"], ["p"]),
        helper.make_node("MatMul", ["other", "w"], ["q"]),
        helper.make_node("Concat", ["p", "q"], ["y"], axis=0),
    ]
    ports = {"x": ["rows", 32], "sizes": (TensorProto.INT64, [2])}, {"y": ["rows", 48]}
    model = ir.from_proto(model_of(nodes, *ports, {"w": weight}))
    quantize_weights(model)
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for sizes in ([3, 0], [0, 3], [1, 2]):
        (actual,) = session.run(None, {"x": x, "sizes": np.array(sizes)})
        assert np.abs(actual - x @ weight).max() < 0.02 * np.ptp(x @ weight)
