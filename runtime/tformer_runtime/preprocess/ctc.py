"""Connectionist temporal classification: from scores of tokens at each frame to a text.

A path has a token or the blank at each frame; it says a labelling: runs of one token are one, and blanks are left out.
Greedy decoding takes the likeliest path. A labelling's probability is that of all paths that say it, by which prefix
beam search ranks (Graves et al. 2006; Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition
using Bi-Directional Recurrent DNNs").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tformer_runtime.base.arrays import F64, Ints


class Labelling(NamedTuple):
    """score: the natural logarithm of its probability, or of the path's that it was read from."""

    ids: tuple[int, ...]
    score: float


class Stretch(NamedTuple):
    """A piece of text, and its frames: the first, and the one after the last."""

    text: str
    first: int
    end: int


def greedy(logprobs: F64, blank: int) -> tuple[Ints, Labelling]:
    """The likeliest path of (frames, tokens), and what it says."""
    path = logprobs.argmax(1)
    score = float(logprobs.max(1).sum()) if len(path) else 0.0
    return path, Labelling(said(path, blank), score)


def said(path: Sequence[int] | Ints, blank: int) -> tuple[int, ...]:
    """The labelling of a path."""
    return tuple(int(token) for token, _ in groupby(path) if token != blank)


def beam(logprobs: F64, blank: int, size: int) -> list[Labelling]:
    """At most `size` labellings of (frames, tokens), the likeliest first: the exact probabilities of those that no
    prefix was dropped of. Cost: frames × size × tokens, and, for what prefixes are told apart by, × their length."""
    prefixes: list[tuple[int, ...]] = [()]
    ends = np.array([[0.0], [-np.inf]])  # log-probability of each prefix with a blank last, and with its token last
    for scores in logprobs:
        last = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        whole = np.logaddexp(ends[0], ends[1])
        again = np.where([bool(prefix) for prefix in prefixes], ends[1] + scores[last], -np.inf)
        longer = whole[:, None] + scores
        longer[np.arange(len(prefixes)), last] = ends[0] + scores[last]  # a token twice has a blank between
        longer[:, blank] = -np.inf
        places = {prefix: place for place, prefix in enumerate(prefixes)}
        for place, prefix in enumerate(prefixes):  # what is longer by a token may be among them already
            parent = places.get(prefix[:-1]) if prefix else None
            if parent is not None:
                again[place] = np.logaddexp(again[place], longer[parent, prefix[-1]])
                longer[parent, prefix[-1]] = -np.inf
        stays = np.stack([whole + scores[blank], again])
        candidates = np.concatenate([np.logaddexp(*stays), longer.ravel()])
        best = _largest(candidates, size)
        best = best[candidates[best] > -np.inf]
        count, held = len(prefixes), prefixes
        prefixes = [
            held[i] if i < count else (*held[(i - count) // len(scores)], (i - count) % len(scores))
            for i in best.tolist()
        ]
        stay = np.minimum(best, count - 1)
        ends = np.where(best < count, stays[:, stay], np.stack([np.full(len(best), -np.inf), candidates[best]]))
    totals = np.logaddexp(*ends)
    return [Labelling(prefixes[i], float(totals[i])) for i in np.argsort(-totals, kind="stable")]


def _largest(values: F64, count: int) -> Ints:
    """The places of the largest, largest first; of equal ones the first."""
    if count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        some = np.flatnonzero(values >= least)
    else:
        some = np.arange(len(values))
    found: Ints = some[np.argsort(-values[some], kind="stable")][:count]
    return found


def aligned(logprobs: F64, ids: Sequence[int], blank: int) -> Ints:
    """(frames,) the likeliest path of those that say `ids`, which some must. Cost: frames × ids (Viterbi)."""
    states = np.full(2 * len(ids) + 1, blank, np.int64)
    states[1::2] = ids
    skips = np.zeros(len(states), bool)  # a blank may be left out between two tokens that differ
    skips[3::2] = states[3::2] != states[1:-2:2]
    score = np.full(len(states), -np.inf)
    score[:2] = logprobs[0, states[:2]]
    came = np.zeros((len(logprobs), len(states)), np.int8)
    for frame in range(1, len(logprobs)):
        before = np.full((3, len(states)), -np.inf)
        before[0], before[1, 1:] = score, score[:-1]
        before[2, 2:] = np.where(skips[2:], score[:-2], -np.inf)
        came[frame] = before.argmax(0)
        score = before.max(0) + logprobs[frame, states]
    at = len(states) - 1 if len(states) == 1 or score[-1] > score[-2] else len(states) - 2
    path = np.empty(len(logprobs), np.int64)
    for frame in range(len(logprobs) - 1, -1, -1):
        path[frame] = states[at]
        at -= int(came[frame, at])
    return path


@dataclass(frozen=True)
class Spelling:
    """How tokens are spelt.

    tokens: the text of each id. blank: the id of the blank. delimiter: the token between words, and space: what is
    written for it. lower: in lower case. tidy: without the spaces in front of punctuation.
    """

    tokens: tuple[str, ...]
    blank: int
    delimiter: str | None = None
    space: str = " "
    lower: bool = False
    tidy: bool = False

    def text(self, path: Sequence[int] | Ints) -> str:
        """What a path says."""
        text = "".join(stretch.text for stretch in self.characters(path)).strip()
        text = text.lower() if self.lower else text
        return _tidied(text) if self.tidy else text

    def characters(self, path: Sequence[int] | Ints) -> list[Stretch]:
        """Of each token that a path says, spaces too. A run of ids that are spelt alike is one token."""
        found, at, blank = [], 0, self.tokens[self.blank]
        for token, run in groupby(self.tokens[int(id_)] for id_ in path):
            end = at + len(list(run))
            if token != blank:
                found.append(Stretch(self.space if token == self.delimiter else token, at, end))
            at = end
        return found

    def words(self, path: Sequence[int] | Ints) -> list[Stretch]:
        """Of each word: what stands between spaces."""
        found = []
        for is_space, run in groupby(self.characters(path), lambda stretch: stretch.text == self.space):
            if not is_space:
                word = list(run)
                found.append(Stretch("".join(s.text for s in word), word[0].first, word[-1].end))
        return found


def _tidied(text: str) -> str:
    """As transformers' clean_up_tokenization has it."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
