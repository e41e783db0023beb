"""Rows of tables, sums and products, and selected positions by native kernels: numpy's results, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support.native_products import requires_kernels, session_of

from tformer_runtime.rewriting.product_rewrite import DOMAIN

pytestmark = requires_kernels

WIDTH = 24
SHAPES = [(), (1,), (WIDTH,), (1, WIDTH), (5, 1), (5, WIDTH), (3, 1, WIDTH), (3, 5, WIDTH), (1, 5, 1), (0, WIDTH)]


def native(op_type, inputs, weights=(), **attributes):
    """Return a session of one operator of the library. inputs: name → type."""
    names = attributes.pop("names")
    node = helper.make_node(op_type, names, ["y"], domain=DOMAIN, **attributes)
    return session_of([node], [*inputs.items()], [numpy_helper.from_array(array, name) for name, array in weights])


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (2, 0), (1, 2, 3)])
def test_rows_of_float32_are_those_of_numpy(shape):
    table = np.random.default_rng(0).standard_normal((11, WIDTH)).astype(np.float32)
    ids = np.random.default_rng(1).integers(-11, 11, shape)
    session = native("Lookup", {"ids": TensorProto.INT64}, [("t", table)], names=["t", "ids"])
    assert_same_bits(session.run(None, {"ids": ids})[0], table[ids])


@given(st.lists(st.integers(-11, 10), min_size=1, max_size=9))
def test_rows_of_int8_are_scaled_as_by_cast_and_mul(ids):
    random = np.random.default_rng(0)
    table, scale = random.integers(-128, 128, (11, WIDTH), np.int8), random.random((11, 1), np.float32)
    session = native(
        "Lookup", {"ids": TensorProto.INT64}, [("t", table), ("s", scale)], names=["t", "ids", "s"]
    )  # fmt: skip
    ids = np.array([ids])
    assert_same_bits(session.run(None, {"ids": ids})[0], table[ids].astype(np.float32) * scale[ids])


@pytest.mark.parametrize("index", [11, -12, 1 << 62, -(1 << 63)])
def test_index_beyond_the_table_is_an_error(index):
    session = native(
        "Lookup", {"ids": TensorProto.INT64}, [("t", np.ones((11, WIDTH), np.float32))], names=["t", "ids"]
    )
    with pytest.raises(Exception, match=rf"idx={index} must be within the inclusive range \[-11,10\]"):
        session.run(None, {"ids": np.array([[0, index]])})


@pytest.mark.parametrize(
    "weights",
    [
        [("t", np.ones(5, np.float32))],
        [("t", np.ones((5, 2, 2), np.float32))],
        [("t", np.ones((5, 2), np.float64))],
        [("t", np.ones((5, 2), np.int8))],  # without a scale
        [("t", np.ones((5, 2), np.int8)), ("s", np.ones((5, 2), np.float32))],
        [("t", np.ones((5, 2), np.int8)), ("s", np.ones((4, 1), np.float32))],
        [("t", np.ones((5, 2), np.int8)), ("s", np.ones(5, np.float32))],
        [("t", np.ones((5, 2), np.float32)), ("s", np.ones((5, 1), np.float32))],
    ],
)
def test_other_tables_are_an_error(weights):
    names = ["t", "ids", *(["s"] if len(weights) > 1 else [])]
    session = native("Lookup", {"ids": TensorProto.INT64}, weights, names=names)
    with pytest.raises(Exception, match="a table"):
        session.run(None, {"ids": np.array([[0]])})


@given(st.sampled_from(SHAPES), st.sampled_from(SHAPES), st.booleans(), st.integers(0, 1000))
def test_sums_and_products_are_those_of_numpy(a_shape, b_shape, multiplies, seed):
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in (a_shape, b_shape))
    inputs = {"a": TensorProto.FLOAT, "b": TensorProto.FLOAT}
    session = native("Arithmetic", inputs, names=["a", "b"], multiplies=int(multiplies))
    if not a_shape and not b_shape:
        with pytest.raises(Exception, match="1 to 32 axes"):
            session.run(None, {"a": a, "b": b})
        return
    try:
        np.broadcast_shapes(a_shape, b_shape)
    except ValueError:
        with pytest.raises(Exception, match="must have the same shape"):
            session.run(None, {"a": a, "b": b})
        return
    assert_same_bits(session.run(None, {"a": a, "b": b})[0], a * b if multiplies else a + b)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 5), st.integers(0, 1000))
def test_selected_positions_are_those_of_take_along_axis(batch, length, count, seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((batch, length, WIDTH)).astype(np.float32)
    places = random.integers(-length, length, (batch, count))
    session = native("Select", {"x": TensorProto.FLOAT, "p": TensorProto.INT64}, names=["x", "p"])
    assert_same_bits(session.run(None, {"x": x, "p": places})[0], np.take_along_axis(x, places[..., None], 1))


@pytest.mark.parametrize(("places", "message"), [([[3]], "idx=3"), ([[0], [0]], "for each"), ([0], "for each")])
def test_other_positions_are_an_error(places, message):
    session = native("Select", {"x": TensorProto.FLOAT, "p": TensorProto.INT64}, names=["x", "p"])
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones((1, 3, WIDTH), np.float32), "p": np.array(places)})
