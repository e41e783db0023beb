"""Connectionist temporal classification: from scores of tokens at each frame to a text.

A path has a token or the blank at each frame. Its labelling merges runs of one token and drops blanks. Greedy decoding
takes the most probable path. Prefix beam search ranks labellings by the sum of the probabilities of their paths (Graves
et al. 2006; Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional
Recurrent DNNs").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import F64, Ints
from tformer_runtime.format.typed_json import Index


class CtcHypothesis(Struct, frozen=True):
    """A labelling.

    score: the natural logarithm of its probability; in greedy decoding, of the probability of its path.
    """

    ids: tuple[int, ...]
    score: float


class CtcSpan(Struct, frozen=True):
    """A piece of text and its frames. `end` is exclusive."""

    text: str
    first: int
    end: int


def greedy_path(logprobs: F64, blank: int) -> tuple[Ints, CtcHypothesis]:
    """Return the most probable path of (frames, tokens), and its labelling."""
    path = logprobs.argmax(1)
    score = float(logprobs.max(1).sum()) if len(path) else 0.0
    return path, CtcHypothesis(collapse_path(path, blank), score)


def collapse_path(path: Sequence[int] | Ints, blank: int) -> tuple[int, ...]:
    """Return the labelling of a path."""
    return tuple(int(token) for token, _ in groupby(path) if token != blank)


def beam_search(logprobs: F64, blank: int, size: int) -> list[CtcHypothesis]:
    """Return at most `size` labellings of (frames, tokens), the most probable first.

    A score is exact if no prefix of the labelling was dropped. Cost: frames × size × tokens, and frames × size × length
    of the prefixes for finding equal ones.
    """
    prefixes: list[tuple[int, ...]] = [()]
    ends = np.array([[0.0], [-np.inf]])  # log-probability of each prefix ending in a blank, and in its last token
    for scores in logprobs:
        last = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        total = np.logaddexp(ends[0], ends[1])
        repeated = np.where([bool(prefix) for prefix in prefixes], ends[1] + scores[last], -np.inf)
        extended = total[:, None] + scores
        extended[np.arange(len(prefixes)), last] = ends[0] + scores[last]  # a blank separates equal tokens
        extended[:, blank] = -np.inf
        indices = {prefix: index for index, prefix in enumerate(prefixes)}
        for index, prefix in enumerate(prefixes):  # an extended prefix may equal another prefix
            parent = indices.get(prefix[:-1]) if prefix else None
            if parent is not None:
                repeated[index] = np.logaddexp(repeated[index], extended[parent, prefix[-1]])
                extended[parent, prefix[-1]] = -np.inf
        unchanged = np.stack([total + scores[blank], repeated])
        candidates = np.concatenate([np.logaddexp(*unchanged), extended.ravel()])
        best = _largest(candidates, size)
        best = best[candidates[best] > -np.inf]
        count, previous = len(prefixes), prefixes
        prefixes = [
            previous[i] if i < count else (*previous[(i - count) // len(scores)], (i - count) % len(scores))
            for i in best.tolist()
        ]
        parents = np.minimum(best, count - 1)
        ends = np.where(best < count, unchanged[:, parents], np.stack([np.full(len(best), -np.inf), candidates[best]]))
    totals = np.logaddexp(*ends)
    return [CtcHypothesis(prefixes[i], float(totals[i])) for i in np.argsort(-totals, kind="stable")]


def _largest(values: F64, count: int) -> Ints:
    """Return the indices of the largest values, largest first. Of equal values the first comes first."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(len(values))
    indices: Ints = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return indices


def align_path(logprobs: F64, ids: Sequence[int], blank: int) -> Ints:
    """Return the most probable path (frames,) with the labelling `ids`, by the Viterbi algorithm. One must exist.

    Cost: frames × ids.
    """
    states = np.full(2 * len(ids) + 1, blank, np.int64)
    states[1::2] = ids
    skips = np.zeros(len(states), bool)  # between two different tokens the blank is optional
    skips[3::2] = states[3::2] != states[1:-2:2]
    score = np.full(len(states), -np.inf)
    score[:2] = logprobs[0, states[:2]]
    moves = np.zeros((len(logprobs), len(states)), np.int8)  # states from the previous frame's to this one
    for frame in range(1, len(logprobs)):
        previous = np.full((3, len(states)), -np.inf)
        previous[0], previous[1, 1:] = score, score[:-1]
        previous[2, 2:] = np.where(skips[2:], score[:-2], -np.inf)
        moves[frame] = previous.argmax(0)
        score = previous.max(0) + logprobs[frame, states]
    state = len(states) - 1 if len(states) == 1 or score[-1] > score[-2] else len(states) - 2
    path = np.empty(len(logprobs), np.int64)
    for frame in range(len(logprobs) - 1, -1, -1):
        path[frame] = states[state]
        state -= int(moves[frame, state])
    return path


class CtcSpelling(Struct, frozen=True):
    """How tokens become text.

    tokens: the text of each id.
    blank: the id of the blank.
    delimiter: the token between words; None without one.
    space: the text of the delimiter.
    lower: whether the text becomes lower case.
    tidy: whether spaces before punctuation are removed.
    """

    tokens: tuple[str, ...]
    blank: Index
    delimiter: str | None = None
    space: str = " "
    lower: bool = False
    tidy: bool = False

    def text(self, path: Sequence[int] | Ints) -> str:
        """Return the text of a path."""
        text = "".join(span.text for span in self.characters(path)).strip()
        text = text.lower() if self.lower else text
        return _clean_up(text) if self.tidy else text

    def characters(self, path: Sequence[int] | Ints) -> list[CtcSpan]:
        """Return the span of each token of a path, spaces included. A run of ids with one text is one token."""
        spans, begin, blank = [], 0, self.tokens[self.blank]
        for token, run in groupby(self.tokens[int(id_)] for id_ in path):
            end = begin + len(list(run))
            if token != blank:
                spans.append(CtcSpan(self.space if token == self.delimiter else token, begin, end))
            begin = end
        return spans

    def words(self, path: Sequence[int] | Ints) -> list[CtcSpan]:
        """Return the span of each word of a path. Spaces separate words."""
        spans = []
        for is_space, run in groupby(self.characters(path), lambda span: span.text == self.space):
            if not is_space:
                word = list(run)
                spans.append(CtcSpan("".join(span.text for span in word), word[0].first, word[-1].end))
        return spans


def _clean_up(text: str) -> str:
    """Remove spaces before punctuation, as transformers' clean_up_tokenization does."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
