"""Connectionist temporal classification against all paths there are."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_runtime.preprocess.ctc import CtcSpan, CtcSpelling, align_path, beam_search, collapse_path, greedy_path


def drawn(frames, tokens, seed, spread=1.5):
    logits = spread * np.random.default_rng(seed).standard_normal((frames, tokens))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def every_path(logprobs):
    """path → its log-probability."""
    frames, tokens = logprobs.shape
    paths = itertools.product(range(tokens), repeat=frames)
    return {path: sum(logprobs[frame, token] for frame, token in enumerate(path)) for path in paths}


def collapsed(path, blank):
    """Written otherwise than in the runtime: a token counts where the one before is another."""
    return tuple(token for before, token in zip((None, *path), path, strict=False) if token not in (before, blank))


def labellings(logprobs, blank):
    found = defaultdict(lambda: -np.inf)
    for path, score in every_path(logprobs).items():
        found[collapsed(path, blank)] = np.logaddexp(found[collapsed(path, blank)], score)
    return found


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("frames", [1, 2, 5, 6])
def test_a_wide_beam_has_the_probabilities_of_all_labellings(frames, blank):
    logprobs = drawn(frames, 3, seed=frames)
    expected = labellings(logprobs, blank)
    found = beam_search(logprobs, blank, size=10**4)
    assert {labelling.ids for labelling in found} == set(expected)
    for labelling in found:
        assert labelling.score == pytest.approx(expected[labelling.ids], abs=1e-9)
    assert [f.score for f in found] == sorted((f.score for f in found), reverse=True)


def test_a_beam_finds_what_the_likeliest_path_does_not_say():
    logprobs = np.log(np.array([[0.6, 0.4], [0.6, 0.4]]))  # the blank, the blank: 0.36; but some token: 0.64
    assert greedy_path(logprobs, 0)[1].ids == ()
    best = beam_search(logprobs, 0, 4)[0]
    assert best.ids == (1,)
    assert best.score == pytest.approx(np.log(0.64))


def test_a_narrow_beam_never_says_more_than_is_true():
    for seed in range(20):
        logprobs = drawn(6, 4, seed)
        expected = labellings(logprobs, 0)
        found = beam_search(logprobs, 0, 3)
        assert len(found) <= 3
        assert all(labelling.score <= expected[labelling.ids] + 1e-9 for labelling in found)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 4))
def test_the_likeliest_path_of_a_labelling(seed, frames, tokens):
    logprobs = drawn(frames, tokens, seed)
    paths = every_path(logprobs)
    of_each = defaultdict(list)
    for path, score in paths.items():
        of_each[collapsed(path, 0)].append((score, path))
    for ids, some in of_each.items():
        path = tuple(align_path(logprobs, ids, 0).tolist())
        assert collapse_path(path, 0) == collapsed(path, 0) == ids
        assert paths[path] == pytest.approx(max(some)[0])
    best, labelling = greedy_path(logprobs, 0)
    assert paths[tuple(best.tolist())] == pytest.approx(max(paths.values())) == pytest.approx(labelling.score)


def test_spelling():
    spelling = CtcSpelling(("<pad>", "|", "A", "B", "'S"), 0, "|", lower=True, tidy=True)
    path = [1, 0, 2, 2, 0, 2, 3, 1, 1, 0, 1, 3, 3, 0, 0, 1, 4]
    assert spelling.text(path) == "aab  b's"
    assert spelling.words(path) == [CtcSpan("AAB", 2, 7), CtcSpan("B", 11, 13), CtcSpan("'S", 16, 17)]
    assert spelling.characters(path)[:3] == [CtcSpan(" ", 0, 1), CtcSpan("A", 2, 4), CtcSpan("A", 5, 6)]
    assert spelling.text([0, 0]) == ""
