"""Integer weights whose products saturate on no processor, against VPMADDUBSW, simulated and real."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper
from support.older_processor import spelt_out
from support.small_graphs import model_of

from tformer_export.quantize import StaticScale, quantize_weights
from tformer_export.quantize.rounding import pair_sums, round_gptq, round_least_error, round_nearest

INT16 = np.iinfo(np.int16)
floats = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
sizes = st.tuples(st.integers(1, 40), st.integers(1, 6))
# Large neighbouring weights of one sign saturate.
matrices = arrays.arrays(np.float32, sizes, elements=floats | st.sampled_from([-1e3, 1e3]))


def saturates(b):
    """Return whether uint8 activations make the sum of two products exceed 16 bits, for int8 b (K, N)."""
    wide = b.astype(int)
    wide = np.pad(wide, [(0, len(b) % 2), (0, 0)])
    up, down = (255 * (part[0::2] + part[1::2]) for part in (wide.clip(min=0), wide.clip(max=0)))
    return up.max() > INT16.max or down.min() < INT16.min


def iter_roundings(weight):
    """Yield the name and the integers of each rounding for products of uint8 by int8."""
    hessian = round_gptq.Hessian(np.eye(len(weight)) + 0.5)
    yield "to nearest", round_nearest.per_column(weight)[0]
    yield "least error", round_least_error.per_column(weight)[0]
    yield "feedback", round_gptq.per_column(weight, hessian)[0]
    blocks = round_nearest.Blocks(16)
    block_roundings = (
        round_nearest.in_blocks(weight, blocks),
        round_least_error.in_blocks(weight, blocks),
        round_gptq.in_blocks(weight, hessian, blocks),
    )
    for name, (q, codes, _) in zip(("nearest", "least error", "feedback"), block_roundings, strict=True):
        yield f"4 bits, {name}", round_nearest.expand(q, codes, blocks.rows)


@given(matrices)
def test_no_activations_saturate_a_pair(weight):
    for name, q in iter_roundings(weight):
        assert not saturates(q), name
        assert np.abs(q.astype(int)).max() <= 127


def test_each_rounding_reaches_the_pair_limit():
    """The limit is tight: a sum that is larger by one saturates."""
    weight = np.random.default_rng(0).uniform(0.5, 1, (64, 8)).astype(np.float32)
    assert saturates(np.array([[65], [64]], np.int8))
    for name, q in iter_roundings(weight):
        sums = q.reshape(32, 2, 8).astype(int).sum(1)
        assert sums.max() >= pair_sums.MAX_PAIR_SUM - 16, name  # sums of 4-bit weights are multiples of 8 or more


@given(arrays.arrays(np.float32, (2, 1), elements=st.floats(-127, 127, width=32)))
@settings(max_examples=200)
def test_pair_is_rounded_to_nearest_pair_in_range(ratio):
    rounded = pair_sums.round_columns(ratio)[:, 0].astype(int)
    floors = np.floor(ratio[:, 0]).astype(int)
    a, b = (np.arange(n - 70, n + 71) for n in floors)
    cost = (a[:, None] - ratio[0, 0]) ** 2 + (b - ratio[1, 0]) ** 2
    allowed = (np.abs(a[:, None] + b) <= 128) & (np.abs(a) <= 127)[:, None] & (np.abs(b) <= 127)
    min_cost = cost[allowed].min()
    assert ((rounded - ratio[:, 0]) ** 2).sum() <= min_cost + 1e-3


def test_column_scale_is_minimal():
    weight = np.array([[1.0, 1.0, 0.0, 1.0], [-1.0, 1.0, 0.0, 0.1], [0.5, 0.5, 0.0, 0.0]], np.float32)
    scale = pair_sums.column_scale(weight)
    np.testing.assert_allclose(scale, [1 / 127, 2 / 128, 1, 1.1 / 128], rtol=1e-6)
    assert pair_sums.round_columns(weight / scale).tolist() == [
        [127, 64, 0, 116],
        [-127, 64, 0, 12],
        [64, 32, 0, 0],
    ]


def test_normal_weights_lose_less_than_one_bit():
    """The largest of 768 normal numbers is about 3.3 σ, and of 384 sums of two 3.0 √2 σ. A step is therefore
    4.3 σ / 128 instead of 3.3 σ / 127."""
    weight = np.random.default_rng(0).standard_normal((768, 400)).astype(np.float32)
    q, scale = round_nearest.per_column(weight)
    error = np.sqrt(np.square(weight - q * scale).mean(0))
    full_range_error = np.abs(weight).max(0) / 127 / np.sqrt(12)
    assert 1.2 < np.mean(error / full_range_error) < 1.4


# -- in a session --------------------------------------------------------------------------------------------------


def integer_product(b):
    shape = [None, len(b)]
    return model_of(
        [helper.make_node("MatMulInteger", ["a", "b", "zero"], ["y"])],
        {"a": (TensorProto.UINT8, shape)},
        {"y": (TensorProto.INT32, [None, b.shape[1]])},
        {"b": b, "zero": np.uint8(128)},
    )


def run(proto, **inputs):
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)[0]


def saturated_product(a, b, zero):
    """Return the product with saturation as the instruction documents it, by numpy."""
    if len(b) % 2:
        a, b = np.pad(a, [(0, 0), (0, 1)]), np.pad(b, [(0, 1), (0, 0)])
    products = a[:, :, None].astype(int) * b.astype(int)
    pairs = (products[:, 0::2] + products[:, 1::2]).clip(INT16.min, INT16.max)
    return pairs.sum(1) - zero * b.sum(0, dtype=int)


@pytest.mark.parametrize("inner", [7, 64])
def test_simulation_saturates_like_the_instruction(inner):
    random = np.random.default_rng(inner)
    a = random.integers(0, 256, (5, inner), dtype=np.uint8)
    b = random.integers(-127, 128, (inner, 6), dtype=np.int8)
    proto, exact = integer_product(b), (a.astype(int) - 128) @ b.astype(int)
    assert np.array_equal(run(spelt_out(proto, saturating=False), a=a), exact)
    actual = run(spelt_out(proto, saturating=True), a=a)
    assert np.array_equal(actual, saturated_product(a, b, 128))
    assert not np.array_equal(actual, exact)


def test_real_kernels_are_exact_or_saturate_like_the_simulation():
    """The kernels are the ones of this processor. Pairs are neighbours only, for all numbers of rows and columns."""
    random = np.random.default_rng(1)
    for rows, inner, columns in ((1, 13, 5), (2, 40, 17), (9, 64, 16), (33, 130, 48)):
        a = random.integers(0, 256, (rows, inner), dtype=np.uint8)
        b = random.integers(-127, 128, (inner, columns), dtype=np.int8)
        actual, exact = run(integer_product(b), a=a), (a.astype(int) - 128) @ b.astype(int)
        assert np.array_equal(actual, exact) or np.array_equal(actual, saturated_product(a, b, 128))


def test_real_kernels_are_exact_with_weights_in_range():
    random = np.random.default_rng(2)
    weight = random.standard_normal((130, 48)).astype(np.float32)
    for name, q in iter_roundings(weight):
        for a in (np.full((3, 130), 255, np.uint8), random.integers(0, 256, (33, 130), dtype=np.uint8)):
            assert np.array_equal(run(integer_product(q), a=a), (a.astype(int) - 128) @ q.astype(int)), name


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", ["rows", "rows for the CPU", "fixed", "fixed for the CPU"])
def test_quantized_graph_is_equal_with_saturating_products(form, bits):
    """Activations are the largest possible: of one sign and equal in every column."""
    random = np.random.default_rng(3)
    weight = np.abs(random.standard_normal((40, 48))).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    initializers = {"w": weight, "b": random.standard_normal(48).astype(np.float32)}
    proto = model_of(nodes, {"x": [None, 40]}, {"y": [None, 48]}, initializers, name="encode")
    model = ir.from_proto(proto)
    fixed = {"product": StaticScale.between(-3, 3)} if form.startswith("fixed") else {}
    quantize_weights(model, bits, on_cpu=form.endswith("CPU"), static_scales=fixed)
    quantized = ir.to_proto(model)
    x = np.concatenate([np.full((2, 40), 50), random.standard_normal((5, 40))]).astype(np.float32)
    older = run(spelt_out(quantized, saturating=True), x=x)
    assert np.array_equal(older, run(spelt_out(quantized, saturating=False), x=x))
    np.testing.assert_allclose(run(quantized, x=x), older, rtol=1e-5, atol=1e-5)
