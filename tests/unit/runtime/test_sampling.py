"""Draws: the distribution is that of transformers' warpers, and a row's draws are its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as hf

from tformer_runtime import OptionError
from tformer_runtime.sampling import Guess, Sampler, log_normalizer, warped


def _logits(seed: int, size: int = 40) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.4, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
def test_warping_is_that_of_transformers(temperature, top_k, top_p, min_p):
    warpers = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    for seed in range(5):
        scores = torch.tensor(_logits(seed))[None]
        for warper in warpers:
            scores = warper(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        tokens, probabilities = warped(_logits(seed), temperature, top_k, top_p, min_p)
        assert set(tokens.tolist()) == set(np.flatnonzero(expected).tolist())
        np.testing.assert_allclose(probabilities, expected[tokens], atol=1e-6)


def test_ties_at_the_k_th_are_kept():
    tokens, _ = warped(np.array([1, 3, 2, 2, 0], np.float32), 1.0, 2, 1.0)
    assert tokens.tolist() == [1, 2, 3]


def _chance(chi_square: float, freedom: int) -> float:
    """How likely a chi-square at least as great is by chance."""
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
    logits[3] = -np.inf  # what a rule forbids
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
def test_what_comes_after_a_guess_follows_the_models_distribution_not_the_drafts(options, distance):
    """And guesses are taken as often as can be: Σ min(p, q) (Leviathan et al. 2023, corollary 3.6)."""
    logits, draws = _logits(1, 9), 10_000
    drafts = (logits + distance * _logits(2, 9)).astype(np.float32)
    drafts[4] = -np.inf
    p, q = np.zeros(9), np.zeros(9)
    way = (options.get("temperature", 1.0), options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0))
    for into, scores in ((p, logits), (q, drafts)):
        tokens, into_tokens = warped(scores, *way)
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


def test_a_guess_that_was_not_drawn_changes_no_draw():
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


def test_nothing_to_draw_is_refused():
    with pytest.raises(OptionError, match="no token that may come next"):
        warped(np.full(4, -np.inf, np.float32), 1.0, 0, 1.0)


def test_draws_are_those_of_the_seed_the_index_and_the_sample():
    keys = [(5, 0, 0), (5, 1, 0), (5, 0, 1), (6, 0, 0)]
    draws = {key: [sampler(_logits(i)) for i in range(20)] for key, sampler in ((key, Sampler(*key)) for key in keys)}
    assert len({tuple(own) for own in draws.values()}) == len(keys)
    for key in keys:
        again = Sampler(*key)
        assert [again(_logits(i)) for i in range(20)] == draws[key]


def test_the_normalizer():
    logits = np.stack([_logits(1), _logits(2) + 300])
    np.testing.assert_allclose(log_normalizer(logits), torch.tensor(logits).logsumexp(-1).numpy(), rtol=1e-6)
