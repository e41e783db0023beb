"""CTC decoding: beam search, greedy paths and alignments equal an enumeration of all paths."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_runtime.preprocess.ctc import CtcSpan, CtcSpelling, align_path, beam_search, collapse_path, greedy_path


def random_logprobs(frames, tokens, seed, spread=1.5):
    logits = spread * np.random.default_rng(seed).standard_normal((frames, tokens))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def every_path(logprobs):
    """Return the log-probability of each path."""
    frames, tokens = logprobs.shape
    paths = itertools.product(range(tokens), repeat=frames)
    return {path: sum(logprobs[frame, token] for frame, token in enumerate(path)) for path in paths}


def collapsed(path, blank):
    """Return the labelling of a path, by an algorithm other than that of the runtime: keep each token whose predecessor
    is another token."""
    return tuple(token for before, token in zip((None, *path), path, strict=False) if token not in (before, blank))


def labelling_scores(logprobs, blank):
    """Return the log-probability of each labelling, the sum over its paths."""
    scores = defaultdict(lambda: -np.inf)
    for path, score in every_path(logprobs).items():
        scores[collapsed(path, blank)] = np.logaddexp(scores[collapsed(path, blank)], score)
    return scores


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("frames", [1, 2, 5, 6])
def test_wide_beam_has_the_probabilities_of_all_labellings(frames, blank):
    logprobs = random_logprobs(frames, 3, seed=frames)
    expected = labelling_scores(logprobs, blank)
    actual = beam_search(logprobs, blank, size=10**4)
    assert {labelling.ids for labelling in actual} == set(expected)
    for labelling in actual:
        assert labelling.score == pytest.approx(expected[labelling.ids], abs=1e-9)
    assert [f.score for f in actual] == sorted((f.score for f in actual), reverse=True)


def test_beam_search_finds_a_labelling_more_probable_than_the_greedy_path():
    logprobs = np.log(np.array([[0.6, 0.4], [0.6, 0.4]]))  # two blanks have probability 0.36, so token 1 has 0.64
    assert greedy_path(logprobs, 0)[1].ids == ()
    best = beam_search(logprobs, 0, 4)[0]
    assert best.ids == (1,)
    assert best.score == pytest.approx(np.log(0.64))


def test_scores_of_a_narrow_beam_are_lower_bounds():
    for seed in range(20):
        logprobs = random_logprobs(6, 4, seed)
        expected = labelling_scores(logprobs, 0)
        actual = beam_search(logprobs, 0, 3)
        assert len(actual) <= 3
        assert all(labelling.score <= expected[labelling.ids] + 1e-9 for labelling in actual)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 4))
def test_alignment_is_the_most_probable_path_of_its_labelling(seed, frames, tokens):
    logprobs = random_logprobs(frames, tokens, seed)
    paths = every_path(logprobs)
    paths_of_labelling = defaultdict(list)
    for path, score in paths.items():
        paths_of_labelling[collapsed(path, 0)].append((score, path))
    for ids, scored_paths in paths_of_labelling.items():
        path = tuple(align_path(logprobs, ids, 0).tolist())
        assert collapse_path(path, 0) == collapsed(path, 0) == ids
        assert paths[path] == pytest.approx(max(scored_paths)[0])
    best, labelling = greedy_path(logprobs, 0)
    assert paths[tuple(best.tolist())] == pytest.approx(max(paths.values())) == pytest.approx(labelling.score)


def test_spelling_of_a_path_has_text_words_and_characters():
    spelling = CtcSpelling(("<pad>", "|", "A", "B", "'S"), 0, "|", lower=True, tidy=True)
    path = [1, 0, 2, 2, 0, 2, 3, 1, 1, 0, 1, 3, 3, 0, 0, 1, 4]
    assert spelling.text(path) == "aab  b's"
    assert spelling.words(path) == [CtcSpan("AAB", 2, 7), CtcSpan("B", 11, 13), CtcSpan("'S", 16, 17)]
    assert spelling.characters(path)[:3] == [CtcSpan(" ", 0, 1), CtcSpan("A", 2, 4), CtcSpan("A", 5, 6)]
    assert spelling.text([0, 0]) == ""
