"""Draws follow the distribution of transformers' warpers, and depend on their own row alone."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as hf

from tformer_runtime import OptionError
from tformer_runtime.decoding.sampling import (
    DEVICE_SUM_TOLERANCE,
    Guess,
    Sampler,
    TopLogits,
    log_normalizer,
    warp,
    warp_top_logits,
)


def _logits(seed: int, size: int = 40) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.4, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
def test_warped_distribution_equals_transformers(temperature, top_k, top_p, min_p):
    warpers = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    for seed in range(5):
        scores = torch.tensor(_logits(seed))[None]
        for warper in warpers:
            scores = warper(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        tokens, probabilities = warp(_logits(seed), temperature, top_k, top_p, min_p)
        assert set(tokens.tolist()) == set(np.flatnonzero(expected).tolist())
        np.testing.assert_allclose(probabilities, expected[tokens], atol=1e-6)


def test_ties_at_the_kth_token_are_kept():
    tokens, _ = warp(np.array([1, 3, 2, 2, 0], np.float32), 1.0, 2, 1.0)
    assert tokens.tolist() == [1, 2, 3]


def _chance(chi_square: float, freedom: int) -> float:
    """Return the probability of a chi-square of at least this value."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(chi_square / 2)))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3},
        {"temperature": 0.7, "top_k": 6},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 1.6, "top_k": 9, "top_p": 0.95, "min_p": 0.08},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options):
    logits, draws = _logits(1, 12), 20_000
    logits[3] = -np.inf  # forbidden by a rule
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    host = SimpleNamespace(_merge_criteria_processor_list=lambda default, own: default)
    warpers = GenerationMixin._get_logits_processor(host, config)
    assert len(warpers) == len(options)
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), torch.tensor(logits)[None]).softmax(-1)[0].numpy() * draws
    sampler = Sampler(3, 0, 0, **options)
    counts = np.bincount([sampler(logits) for _ in range(draws)], minlength=12)
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert _chance(chi_square, possible.sum() - 1) > 0.001


@pytest.mark.parametrize("distance", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5, "min_p": 0.05}])
def test_speculative_samples_follow_the_distribution_of_the_model(options, distance):
    """Guesses are accepted with probability Σ min(p, q) (Leviathan et al. 2023, corollary 3.6)."""
    logits, draws = _logits(1, 9), 10_000
    drafts = (logits + distance * _logits(2, 9)).astype(np.float32)
    drafts[4] = -np.inf
    p, q = np.zeros(9), np.zeros(9)
    way = (options.get("temperature", 1.0), options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0))
    for into, scores in ((p, logits), (q, drafts)):
        tokens, into_tokens = warp(scores, *way)
        into[tokens] = into_tokens
    sampler, draft = Sampler(3, 0, 0, **options), Sampler(3, 0, 1, **options)
    guesses = [draft.guess(drafts) for _ in range(draws)]
    drawn = np.array([sampler(logits, guess) for guess in guesses])
    counts = np.bincount(drawn, minlength=9)
    assert not counts[p == 0].any()
    chi_square = ((counts - p * draws)[p > 0] ** 2 / (p * draws)[p > 0]).sum()
    assert _chance(chi_square, (p > 0).sum() - 1) > 0.001
    taken = (drawn == [guess.token for guess in guesses]).mean()
    assert taken == pytest.approx(np.minimum(p, q).sum(), abs=0.02)


def test_guess_without_a_draw_changes_no_draw():
    samplers = Sampler(3, 0, 0), Sampler(3, 0, 0)
    for i in range(50):
        assert samplers[0](_logits(i), Guess(i % 40)) == samplers[1](_logits(i))


@pytest.mark.parametrize("other", [(5, 0, 1), (5, 1, 0), (6, 0, 0)])
def test_draws_of_another_seed_index_or_sample_are_independent(other):
    logits, draws = np.linspace(0, 1, 5, dtype=np.float32), 8_000
    pair = [Sampler(5, 0, 0), Sampler(*other)]
    first, second = ([sampler(logits) for _ in range(draws)] for sampler in pair)
    counts = np.zeros((5, 5))
    np.add.at(counts, (first, second), 1)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / draws
    assert _chance(((counts - expected) ** 2 / expected).sum(), 16) > 0.001


def test_row_without_a_possible_token_is_refused():
    with pytest.raises(OptionError, match="no token that may come next"):
        warp(np.full(4, -np.inf, np.float32), 1.0, 0, 1.0)


def test_draws_follow_from_seed_index_and_sample():
    keys = [(5, 0, 0), (5, 1, 0), (5, 0, 1), (6, 0, 0)]
    draws = {key: [sampler(_logits(i)) for i in range(20)] for key, sampler in ((key, Sampler(*key)) for key in keys)}
    assert len({tuple(tokens) for tokens in draws.values()}) == len(keys)
    for key in keys:
        again = Sampler(*key)
        assert [again(_logits(i)) for i in range(20)] == draws[key]


def test_normaliser_equals_logsumexp():
    logits = np.stack([_logits(1), _logits(2) + 300])
    np.testing.assert_allclose(log_normalizer(logits), torch.tensor(logits).logsumexp(-1).numpy(), rtol=1e-6)


def top_logits(logits: np.ndarray, count: int, temperature: float, off: float = 0.0) -> TopLogits:
    """Return the top logits of a device. off: relative error of its normaliser."""
    order = np.lexsort((np.arange(len(logits)), -logits))[:count]
    tokens = np.sort(order)
    with np.errstate(invalid="ignore"):
        total = np.exp((logits.astype(np.float64) - logits.max()) / temperature).sum() * (1 + off)
    return TopLogits(tokens, logits[tokens], float(total), count >= len(logits))


def assert_equal_or_undecided(logits: np.ndarray, head: TopLogits, *way: float) -> bool:
    """Return whether the top logits decide the distribution; if so, it equals that of the full row, bit for bit."""
    actual = warp_top_logits(head, *way)
    if actual is None:
        return False
    tokens, probabilities = warp(logits, *way)
    np.testing.assert_array_equal(actual[0], tokens)
    np.testing.assert_array_equal(actual[1], probabilities)
    return True


@pytest.mark.parametrize(
    ("way", "decided_share"),
    [
        ((1.0, 1, 1.0, 0.0), 1.0),
        ((0.7, 40, 1.0, 0.0), 1.0),
        ((1.3, 40, 0.8, 0.02), 1.0),
        ((1.0, 64, 1.0, 0.0), 0.0),  # tokens beyond the 64 may tie with the last
        ((0.5, 0, 0.9, 0.0), 0.9),
        ((1.0, 0, 0.5, 0.1), 0.95),
        ((1.0, 0, 0.999, 0.0), 0.0),
        ((1.0, 0, 1.0, 0.05), 0.95),
        ((4.0, 0, 1.0, 0.01), 0.0),
        ((1.0, 0, 1.0, 0.0), 0.0),  # every token is possible
    ],
)
def test_sampling_from_top_k_matches_full_row(way, decided_share):
    """The top logits decide in the stated cases, for any allowed error of the normaliser."""
    count = 0
    for seed in range(60):
        logits = (np.random.default_rng(seed).standard_normal(2000) * 3).astype(np.float32)
        head = top_logits(logits, 64, way[0], DEVICE_SUM_TOLERANCE * (-1, 0, 1)[seed % 3] * 0.99)
        count += assert_equal_or_undecided(logits, head, *way)
    assert count == 0 if decided_share == 0 else count >= decided_share * 60


_near = st.sampled_from([0.0, -0.0, 1e-40, 1e-8, 1.0, 1.0 + 2**-23, 2.0, 3.0, 50.0, -50.0, -np.inf])


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(
    logits=st.lists(_near | st.floats(-4, 4, width=32), min_size=2, max_size=24),
    count=st.integers(1, 24),
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 2.5, 1e6]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.5, 0.9, 0.25, 0.01]) | st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 1.0, 0.5, 0.0]) | st.floats(0, 1),
    off=st.floats(-0.99 * DEVICE_SUM_TOLERANCE, 0.99 * DEVICE_SUM_TOLERANCE),
)
def test_sampling_from_top_k_never_differs_from_full_row(logits, count, temperature, top_k, top_p, min_p, off):
    """Rows with ties, with adjacent floats, and with few possible tokens."""
    row = np.array(logits, np.float32)
    hypothesis.assume(np.isfinite(row).any())
    assert_equal_or_undecided(
        row, top_logits(row, min(count, len(row)), temperature, off), temperature, top_k, top_p, min_p
    )


def test_nucleus_that_ends_at_a_tie_needs_the_full_row():
    even = np.zeros(100, np.float32)  # any 50 of 100 have half of the probability
    assert warp_top_logits(top_logits(even, 64, 1.0), 1.0, 0, 0.5) is None
    steps = np.log(np.array([0.5, 0.25, 0.125, *[0.125 / 97] * 97])).astype(np.float32)
    assert warp_top_logits(top_logits(steps, 8, 1.0), 1.0, 0, 0.75) is None  # two or three tokens, decided by rounding
    assert assert_equal_or_undecided(steps, top_logits(steps, 8, 1.0), 1.0, 0, 0.74, 0.0)
    assert assert_equal_or_undecided(steps, top_logits(steps, 8, 1.0), 1.0, 0, 0.76, 0.0)


def test_sampler_draws_nothing_when_it_needs_the_full_row():
    """The next draw equals that from the full row."""
    logits = _logits(4, 500)
    one, other = Sampler(5, 0, 0, top_p=0.999), Sampler(5, 0, 0, top_p=0.999)
    for _ in range(10):
        assert one.draw_from_top_logits(top_logits(logits, 16, 1.0)) is None
        assert one(logits) == other(logits)
    few = Sampler(5, 0, 0, top_k=5), Sampler(5, 0, 0, top_k=5)
    assert [few[0].draw_from_top_logits(top_logits(logits, 16, 1.0)) for _ in range(50)] == [
        few[1](logits) for _ in range(50)
    ]
