"""Integers with better scales than rounding to nearest, and with error feedback: held against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tformer_export.quantize.rounding import round_gptq, round_least_error, round_nearest

floats = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=floats)
blocks = st.sampled_from([4, 16, 32])


def rounded(found, block):
    """What integers stand for, written out element by element."""
    q, *rest = found
    if len(rest) == 1:
        return q.astype(np.float64) * rest[0]
    m, scale = rest
    return np.array([[float(q[k, n]) * m[k // block, n] * scale[n] for n in range(q.shape[1])] for k in range(len(q))])


def loss(weight, found, block, importance):
    return (importance[:, None] * (weight.astype(np.float64) - rounded(found, block)) ** 2).sum(0)


@given(matrices, blocks, st.booleans())
@settings(max_examples=60)
def test_the_search_is_never_worse_than_rounding_to_nearest(weight, block, weighted):
    importance = np.linspace(0.2, 3, len(weight)) if weighted else np.ones(len(weight))
    own = importance / importance.mean() + 1e-3 if weighted else importance
    given = importance if weighted else None
    for search, nearest in (
        (round_least_error.in_blocks(weight, block, given), round_nearest.in_blocks(weight, block)),
        (round_least_error.per_column(weight, given), round_nearest.per_column(weight)),
    ):
        least, plain = loss(weight, search, block, own), loss(weight, nearest, block, own)
        noise = own.sum() * (2.0**-22 * np.abs(weight).max()) ** 2  # they were compared in float32
        assert (least <= plain * (1 + 1e-4) + noise).all()
        for a, b in zip(search, nearest, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype


@given(matrices, blocks)
@settings(max_examples=40)
def test_four_bits_and_their_multiplier_make_an_int8(weight, block):
    moments = round_gptq.Hessian(np.eye(len(weight)) + 0.5)
    for q, m, scale in (round_least_error.in_blocks(weight, block), round_gptq.in_blocks(weight, moments, block)):
        assert q.shape == weight.shape
        assert m.shape == (-(-len(weight) // block), weight.shape[1])
        assert q.min() >= -8
        assert q.max() <= 7
        assert m.min() >= 1
        assert np.abs(round_nearest.expand(q, m, block).astype(int)).max() <= 127
        assert (round_nearest.expand(q, m, block) * scale == rounded((q, m, scale), block).astype(np.float32)).all()
        assert (scale > 0).all()
        assert not q[:, ~weight.any(0)].any()


def test_the_search_gains_what_clipping_gains():
    """Normal weights in blocks of 128: the best uniform quantiser of 16 levels has a mean squared error of 0.01154 σ²
    (Max 1960), and one that is fitted to each 128 loses less; reaching the largest of them loses more."""
    weight = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    plain = np.square(weight - rounded(round_nearest.in_blocks(weight, 128), 128)).mean()
    least = np.square(weight - rounded(round_least_error.in_blocks(weight, 128), 128)).mean()
    assert least < 0.01154 < 1.05 * 0.01154 < plain


def data(seed, k, n, samples=400):
    """Correlated inputs of unequal loudness, and weights."""
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((k, k)) * np.exp(random.standard_normal(k))
    x = random.standard_normal((samples, k)) @ mixing
    return x, random.standard_normal((k, n)).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [48, 77, 128])
def test_feedback_loses_less_of_the_result(bits, k):
    x, weight = data(k, k, 12)
    moments, block = round_gptq.Hessian(x.T @ x / len(x)), 32
    importance = np.square(x).mean(0)
    nearest = round_nearest.in_blocks(weight, block) if bits == 4 else round_nearest.per_column(weight)
    searched = (
        round_least_error.in_blocks(weight, block, importance)
        if bits == 4
        else round_least_error.per_column(weight, importance)
    )
    fed_back = round_gptq.in_blocks(weight, moments, block) if bits == 4 else round_gptq.per_column(weight, moments)

    def error(found):
        return np.square(x @ (weight - rounded(found, block))).sum()

    assert error(fed_back) < 0.5 * error(nearest)
    assert error(fed_back) < 0.7 * error(searched)


def obs(weight, hessian, steps, low, high, damping):
    """Optimal brain quantisation as the paper derives it: round a row, spread its error over those that are left by the
    inverse of *their* Hessian, inverted anew for each row."""
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    h = torch.tensor(hessian) + damping * float(np.diagonal(hessian).mean()) * torch.eye(
        len(hessian), dtype=torch.float64
    )
    w, q = torch.tensor(weight, dtype=torch.float64), torch.zeros(weight.shape)
    left = [int(k) for k in order]
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        k = left[0]
        q[k] = (w[k] / torch.tensor(steps[k])).round().clamp(low, high)
        error = (w[k] - q[k] * torch.tensor(steps[k])) / inverse[0, 0]
        w[left] -= torch.outer(inverse[:, 0], error)
        left = left[1:]
    return q.numpy()


@pytest.mark.parametrize("k", [5, 40, 150])  # more and fewer than the rows that are updated together
def test_feedback_is_the_published_algorithm(k):
    x, weight = data(3, k, 6)
    hessian = x.T @ x / len(x)
    steps = np.broadcast_to(np.abs(weight).max(0).astype(np.float64) / 7, weight.shape)
    expected = obs(weight, hessian, steps, -8, 7, round_gptq.DAMPING)
    found = round_gptq.round_with_feedback(weight, round_gptq.Hessian(hessian), steps, -8, 7)
    assert np.array_equal(found, expected)


def test_inputs_that_never_come_are_rounded_to_nearest():
    """Nothing is known of them; nor can they make up for others."""
    x, weight = data(4, 24, 5)
    x[:, 7] = 0
    hessian = x.T @ x / len(x)
    steps = np.broadcast_to(np.abs(weight).max(0) / 7, weight.shape)
    found = round_gptq.round_with_feedback(weight, round_gptq.Hessian(hessian), steps, -8, 7)
    assert np.array_equal(found[7], np.rint(weight[7] / steps[7]))
    assert np.abs(found).max() <= 8


@pytest.mark.parametrize("hessian", [np.zeros((16, 16)), np.ones((16, 16))])
def test_a_hessian_that_tells_nothing(hessian):
    weight = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    q, m, scale = round_gptq.in_blocks(weight, round_gptq.Hessian(hessian), 16)
    assert np.isfinite(scale).all()
    assert np.abs(weight - rounded((q, m, scale), 16)).max() < 1
