"""The best continuations of beams equal those of a sort in Python, by numpy and by the native kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_runtime.backend.native_kernels import OFF, VARIABLE, NativeRanking, find_native_ranking
from tformer_runtime.decoding.beam_ranking import best, find_ranking, rank_beams
from tformer_runtime.decoding.sampling import log_normalizer

NATIVE = find_native_ranking()
RANKINGS = {"numpy": rank_beams, **({"native": NATIVE} if NATIVE is not None else {})}


@st.composite
def steps(draw):
    """Logits, of which many may be equal or forbidden, with their norms, and the rows and scores of some beams."""
    groups, beams, width = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    columns = draw(st.one_of(st.integers(1, 100), st.integers(32 * 4 * width - 3, 32 * 4 * width + 70)))
    spare = draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.standard_normal((groups * beams + spare, columns)).astype(np.float32) * 4
    if draw(st.booleans()):
        logits = np.round(logits)  # equal logits
    forbidden = draw(st.sampled_from([0, 0, 0.3, 0.97]))
    keep = random.integers(0, columns, len(logits))  # a row without any token has no norm
    is_kept = np.arange(columns) == keep[:, None]
    norms = log_normalizer(logits)
    logits[(random.random(logits.shape) < forbidden) & ~is_kept] = -np.inf
    rows = random.permutation(len(logits))[: groups * beams].reshape(groups, beams)
    scores = -random.random((groups, beams)).astype(np.float32) * draw(st.sampled_from([1, 30]))
    if draw(st.booleans()):
        scores[:] = scores[0, 0]
        logits[rows] = logits[rows[0, 0]]  # equal beams
        norms[rows] = norms[rows[0, 0]]
    return logits, norms, rows, scores, width


def ranked_by_sorting(logits, norms, rows, scores, width):
    """Yield (score, log-probability, beam, token) of each possible continuation of each group, as `rank_beams` does."""
    for group_rows, group_scores in zip(rows, scores, strict=True):
        candidates = []
        for beam, (row, score) in enumerate(zip(group_rows, group_scores, strict=True)):
            tokens = sorted(range(logits.shape[1]), key=lambda token: -logits[row, token])[:width]
            gains = [logits[row, token] - norms[row] for token in tokens]
            candidates += [(gain + score, gain, beam, token) for gain, token in zip(gains, tokens, strict=True)]
        possible = [candidate for candidate in candidates if np.isfinite(candidate[0])]
        yield sorted(possible, key=lambda candidate: -candidate[0])[:width]


@pytest.mark.parametrize("name", RANKINGS)
@given(step=steps())
def test_best_continuations_equal_a_sort(name, step):
    logits, *_, width = step
    before = logits.copy()
    arrays = RANKINGS[name](*step)
    for group, expected in enumerate(ranked_by_sorting(*step)):
        top, gains, beams, tokens = (array[group] for array in arrays)
        count = len(expected)
        actual = zip(*(array[:count].tolist() for array in (top, gains, beams, tokens)), strict=True)
        assert list(actual) == [(float(score), float(gain), beam, token) for score, gain, beam, token in expected]
        assert len(top) == width
        assert (top[count:] == -np.inf).all()
        assert (beams < step[2].shape[1]).all()
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("name", RANKINGS)
def test_logits_may_be_part_of_other_arrays(name):
    random = np.random.default_rng(0)
    stored = random.standard_normal((6, 3, 50)).astype(np.float32)
    norms, rows, scores = log_normalizer(stored[:, 1]), np.arange(6).reshape(3, 2)[::-1], np.zeros((3, 2), np.float32)
    expected = RANKINGS[name](stored[:, 1].copy(), norms, rows.copy(), scores, 4)
    for logits in (stored[:, 1], np.asfortranarray(stored[:, 1])):
        for actual, wanted in zip(RANKINGS[name](logits, norms, rows, scores, 4), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("columns", [40, 5000])
def test_first_of_many_equal_values_are_the_best(columns):
    scores = np.zeros((2, columns), np.float32)
    scores[1, ::7] = 1
    _, picks = best(scores, 5)
    assert picks.tolist() == [[0, 1, 2, 3, 4], [0, 7, 14, 21, 28]]


@pytest.mark.skipif(NATIVE is None, reason="native kernels are not built: make kernels")
def test_kernels_rank_beams_unless_they_are_turned_off(monkeypatch):
    monkeypatch.setenv(VARIABLE, OFF)
    assert find_ranking() is rank_beams
    monkeypatch.undo()
    assert isinstance(find_ranking(), NativeRanking)
