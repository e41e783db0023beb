"""Draws: the distribution is that of transformers' warpers, and a row's draws are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from tformer_runtime.sampling import Sampler, greedy, log_normalizer, warped


def _logits(seed: int, size: int = 40) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.4, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
def test_warping_is_that_of_transformers(temperature, top_k, top_p):
    warpers = [hf.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for seed in range(5):
        scores = torch.tensor(_logits(seed))[None]
        for warper in warpers:
            scores = warper(None, scores)
        expected = scores.softmax(-1)[0].numpy()
        tokens, probabilities = warped(_logits(seed), temperature, top_k, top_p)
        assert set(tokens.tolist()) == set(np.flatnonzero(expected).tolist())
        np.testing.assert_allclose(probabilities, expected[tokens], atol=1e-6)


def test_ties_at_the_k_th_are_kept():
    tokens, _ = warped(np.array([1, 3, 2, 2, 0], np.float32), 1.0, 2, 1.0)
    assert tokens.tolist() == [1, 2, 3]


def test_draws_follow_the_distribution():
    logits, draws = _logits(1, 12), 20_000
    sampler = Sampler([(0, 0)], seed=3, temperature=1.3)
    counts = np.bincount([int(sampler(logits[None], np.array([0]))[0]) for _ in range(draws)], minlength=12)
    expected = warped(logits, 1.3, 0, 1.0)[1] * draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001


def test_a_rows_draws_depend_on_its_seed_and_index_alone():
    logits = np.stack([_logits(i) for i in range(3)])
    together = Sampler([(0, 0), (1, 0), (2, 0)], seed=5)
    first = [together(logits, np.array([0, 1, 2])) for _ in range(4)]
    alone = Sampler([(2, 0)], seed=5)
    assert [int(alone(logits[2:], np.array([0]))[0]) for _ in range(4)] == [int(tokens[2]) for tokens in first]
    left = Sampler([(0, 0), (1, 0), (2, 0)], seed=5)
    left(logits, np.array([0, 1, 2]))
    assert left(logits[[2]], np.array([2]))[0] == first[1][2]


def test_no_seed_draws_anew_each_time():
    logits = np.zeros((1, 1000), np.float32)
    draws = {tuple(int(s(logits, np.array([0]))[0]) for _ in range(4)) for s in (Sampler([(0, 0)], None) for _ in "ab")}
    assert len(draws) == 2


def test_greedy_and_the_normalizer():
    logits = np.stack([_logits(1), _logits(2) + 300])
    assert greedy(logits, np.arange(2)).tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(log_normalizer(logits), torch.tensor(logits).logsumexp(-1).numpy(), rtol=1e-6)
