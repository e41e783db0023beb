"""Native kernels give the bits of onnxruntime's operators: all paths of this processor, all forms of a product."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_products import PATHS, Product, open_native_session, open_session, requires_kernels, run

pytestmark = requires_kernels

sizes = st.integers(1, 300)
products = st.builds(
    Product,
    inner=sizes,
    columns=st.integers(1, 130),
    bits=st.sampled_from([8, 6, 4]),
    before=st.sampled_from([None, "Relu", "Gelu", "Tanh"]),
    graph=st.sampled_from(["graph", "encode"]),
    on_cpu=st.booleans(),
    has_bias=st.booleans(),
    is_static=st.booleans(),
)


def rows_of(inner: int, rows: int, seed: int) -> np.ndarray:
    """Return random rows of different size, one of zeros and one that a Relu clears among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, inner)) * 10.0 ** random.integers(-3, 4, (rows, 1))
    x[random.random(rows) < 0.1] = 0
    cleared = random.random(rows) < 0.1
    x[cleared] = -np.abs(x[cleared])
    return x.astype(np.float32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60)
@given(product=products, rows=st.sampled_from([1, 2, 3, 5, 8, 13, 31, 50]), seed=st.integers(0, 1000))
def test_product_has_the_bits_of_onnxruntimes_operators(path, product, rows, seed):
    if product.inner * product.columns < 1024:  # stays in float
        product = dataclasses.replace(product, inner=32, columns=product.columns + 32)
    model = product.model(seed)
    x = rows_of(product.inner, rows, seed)
    assert_same_bits(run(open_native_session(model, path), x), run(open_session(model), x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("inner", [16, 40, 100, 200, 512])  # 40, 100 and 200 are padded to blocks
def test_packed_forms_for_latency_have_the_bits_of_the_form_for_rows(path, bits, inner):
    """The branch for few rows is gone: each row, alone or with others, is as in the form for many rows."""
    model = Product(inner, 72, bits, optimize_for="latency").model()
    native = open_native_session(model, path)
    x = rows_of(inner, 9, 0)
    expected = run(open_session(model), x)
    assert_same_bits(run(native, x), expected)
    for i in range(len(x)):
        assert_same_bits(run(native, x[i : i + 1]), expected[i : i + 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 4])
def test_row_does_not_depend_on_neighbours_or_threads(path, bits):
    """Rows are divided into blocks, and from 8 blocks of 48 rows (4 bits: 144) on by themselves alone."""
    model = Product(96, 200, bits).model()
    x = rows_of(96, 1100, 1)
    one, several = open_native_session(model, path), open_native_session(model, path, threads=3)
    whole = run(one, x)
    assert_same_bits(run(several, x), whole)
    for rows in (1, 2, 7, 12, 13, 25, 49, 97, 145, 336, 337, 1008, 1009):
        assert_same_bits(run(several, x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_give_no_results(path, bits):
    native = open_native_session(Product(64, 48, bits, on_cpu=False).model(), path)
    assert run(native, np.empty((0, 64), np.float32)).shape == (0, 48)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_large_product_has_the_bits_of_onnxruntimes_operators(path, bits):
    model = Product(1100, 1000, bits).model()
    x = rows_of(1100, 60, 2)
    assert_same_bits(run(open_native_session(model, path, threads=2), x), run(open_session(model), x))


@pytest.mark.parametrize("path", PATHS)
def test_row_that_is_no_number_does_not_change_others(path):
    model = Product(64, 48).model()
    x = rows_of(64, 6, 3)
    native, bad = open_native_session(model, path), x.copy()
    bad[2, 5], bad[3, 1], bad[4, 7] = np.nan, np.inf, -np.inf
    expected, actual = run(native, x), run(native, bad)
    for row in (0, 1, 5):
        assert_same_bits(actual[row], expected[row])
