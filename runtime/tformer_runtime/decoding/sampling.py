"""How the next token is drawn from logits, and what logits are in probabilities."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_runtime.backend.sampling_graph import TOP_TOKENS, TopLogits
from tformer_runtime.base.arrays import F32, F64, Ints
from tformer_runtime.base.errors import OptionError

if TYPE_CHECKING:
    from tformer_runtime.decoding.options import Settings


# Of a sum that a device makes in float32, at most. In a tree of 1024 threads each adds up some hundred numbers,
# rounding by 2⁻²⁴ each time, 2e-5 in all; what an exponential is off by, 2⁻²² and as much for its argument, is less.
SLACK = 1e-4
_BLOCK = 1 << 17  # numbers; 128 rows of 32,000 take 5.9 ms so, and 8.6 all at once
_EXACT = 1e-9  # of float64, at most: sums over a vocabulary, and exponentials of equal numbers


def log_normalizer(logits: F32, top: F32 | None = None) -> F32:
    """log Σ exp(logits) of each row: logits minus this are log-probabilities. top: the greatest of each row, if that
    is known.

    Cost: one pass over the logits, block by block, so that the next operation finds near what the last has left.
    """
    rows = max(1, _BLOCK // logits.shape[1])
    if len(logits) <= rows:
        return _normalizers(logits, top)
    blocks = (slice(first, first + rows) for first in range(0, len(logits), rows))
    return np.concatenate([_normalizers(logits[block], None if top is None else top[block]) for block in blocks])


def _normalizers(logits: F32, top: F32 | None) -> F32:
    # The ufuncs' own reductions: on a small vocabulary the wrappers around them are most of the time.
    top = np.maximum.reduce(logits, -1) if top is None else top
    shifted = np.subtract(logits, top[:, None])
    np.exp(shifted, out=shifted)
    total: F32 = top + np.log(np.add.reduce(shifted, -1))
    return total


def seed_of(settings: Settings) -> int:
    """The seed that settings name, or another at each call if they name none."""
    return int.from_bytes(os.urandom(8), "big") if settings.seed is None else settings.seed


@dataclass(frozen=True)
class Guess:
    """A token that may come next. tokens, probabilities: what it was drawn from, in the order of the vocabulary; None
    if it was not drawn."""

    token: int
    tokens: Ints | None = None
    probabilities: F64 | None = None


class Sampler:
    """Draws from a row's distribution, warped by temperature, then top-k, top-p and min-p (transformers' order).

    The row has a generator of its own, seeded by (seed, its request's index, which sample of the request), one number a
    token, or two where the guess of a draft model is refused, so that its draws do not depend on its neighbours.
    """

    def __init__(
        self,
        seed: int,
        index: int,
        copy: int,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> None:
        self._generator = np.random.default_rng([seed, index, copy])
        self.temperature = 1.0 if temperature is None else temperature
        self._top_k = top_k or 0
        self._top_p = 1.0 if top_p is None else top_p
        self._min_p = min_p or 0.0

    @classmethod
    def of(cls, settings: Settings, seed: int, index: int, copy: int) -> Sampler:
        """The one that settings ask for."""
        return cls(seed, index, copy, settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    def __call__(self, logits: F32, guess: Guess | None = None) -> int:
        """A token for (vocabulary,) logits. OptionError if all are -inf.

        guess: what a draft model has drawn from a distribution q of its own. It is taken with the probability
        min(1, p / q), and what comes in its place is drawn from max(0, p - q), so that what comes is distributed as p
        (Leviathan et al. 2023, Chen et al. 2023). A guess that was not drawn changes nothing: what comes may be it.
        """
        tokens, probabilities = self._warp(logits)
        if guess is not None and guess.tokens is not None and guess.probabilities is not None:
            drafts = _of(tokens, guess.tokens, guess.probabilities)
            at = int(np.searchsorted(tokens, guess.token))
            possible = at < len(tokens) and tokens[at] == guess.token
            if possible and self._generator.random() * drafts[at] < probabilities[at]:
                return guess.token
            left = np.maximum(probabilities - drafts, 0)
            probabilities = left if left.any() else probabilities  # where they are the same but for rounding
        return self._drawn(tokens, probabilities)

    def guess(self, logits: F32) -> Guess:
        """A token that is drawn, and what it was drawn from."""
        tokens, probabilities = self._warp(logits)
        return Guess(self._drawn(tokens, probabilities), tokens, probabilities)

    @property
    def of_few(self) -> bool:
        """Whether what may be drawn is few tokens, as a rule, so that the top logits may tell it."""
        return 0 < self._top_k < TOP_TOKENS or (not self._top_k and (self._top_p < 1 or self._min_p > 0))

    def of_top_logits(self, top: TopLogits) -> int | None:
        """The very token for a row's top logits that a call would give for all of them; None, and nothing is drawn, if
        that does not follow from these alone."""
        found = warp_top_logits(top, self.temperature, self._top_k, self._top_p, self._min_p)
        return None if found is None else self._drawn(*found)

    def _warp(self, logits: F32) -> tuple[Ints, F64]:
        return warp(logits, self.temperature, self._top_k, self._top_p, self._min_p)

    def _drawn(self, tokens: Ints, weights: F64) -> int:
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(tokens[min(int(at), len(tokens) - 1)])


def _of(tokens: Ints, others: Ints, probabilities: F64) -> F64:
    """The probabilities of `tokens` by those of `others`, both in the order of the vocabulary."""
    at = np.minimum(np.searchsorted(others, tokens), len(others) - 1)
    return np.where(others[at] == tokens, probabilities[at], 0.0)


def warp(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[Ints, F64]:
    """The tokens that may be drawn and their probabilities, in the order of the vocabulary.

    top_k keeps ties with the k-th. top_p drops the least likely tokens as long as they sum to at most 1 - p. min_p
    drops those less than p times as likely as the likeliest. The likeliest always stays. (Holtzman et al. 2020 and
    Nguyen et al. 2024, as in transformers' TopPLogitsWarper and MinPLogitsWarper.)
    Raises OptionError if all logits are -inf: there is nothing to draw. Sorts the vocabulary for top_p.
    """
    tokens = np.flatnonzero(logits != -np.inf)
    if not len(tokens):
        raise OptionError("the options leave no token that may come next")
    scores = logits[tokens].astype(np.float64) / temperature
    tokens, scores = _of_top_k(tokens, scores, top_k)
    weights = np.exp(scores - scores.max())
    if top_p < 1:
        order = np.argsort(weights, kind="stable")
        kept = np.cumsum(weights[order]) > (1 - top_p) * weights.sum()
        kept[-1] = True
        keep = np.sort(order[kept])
        tokens, weights = tokens[keep], weights[keep]
    return _of_min_p(tokens, weights, min_p)


def warp_top_logits(
    top: TopLogits, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Ints, F64] | None:
    """As `warped` for the whole row, bit for bit; None if a token that is not among the top logits may be drawn, or is
    not clearly one that may not. A pass over them, and for top_p a sort of it.

    What is drawn depends on nothing but which tokens may be: their weights are exp((logit - greatest) / temperature) in
    either case. top_k and min_p tell these by these numbers. top_p asks how much all weigh, which is known to
    within SLACK; where this could matter, it is not decided here.
    """
    if top.whole or top.logits.min() == -np.inf:
        tokens, probabilities = warp(top.logits, temperature, top_k, top_p, min_p)
        return top.tokens[tokens], probabilities
    scores = top.logits.astype(np.float64) / temperature
    least, greatest = scores.min(), scores.max()  # tokens that are not among them may be as likely as its least
    if top_k:
        if top_k > np.count_nonzero(scores > least):
            return None
        kept = _of_top_k(np.arange(len(scores)), scores, top_k)[0]
        tokens, probabilities = warp(top.logits[kept], temperature, 0, top_p, min_p)
        return top.tokens[kept][tokens], probabilities
    tokens, weights = top.tokens, np.exp(scores - greatest)
    beyond = weights.min() * (1 + _EXACT)
    if top_p < 1:
        order = np.argsort(weights, kind="stable")
        before = np.cumsum(weights[order[::-1]])[::-1] - weights[order]  # of the tokens that are likelier
        before[-1] = 0
        stays, goes = before < (top_p - SLACK) * top.total, before >= (top_p + SLACK) * top.total
        stays[-1], goes[-1] = True, False
        keep = np.sort(order[stays])
        if not (stays | goes).all() or weights[keep].min() <= beyond:
            return None
        tokens, weights = tokens[keep], weights[keep]
    elif min_p <= beyond:
        return None
    return _of_min_p(tokens, weights, min_p)


def _of_top_k(tokens: Ints, scores: F64, top_k: int) -> tuple[Ints, F64]:
    if not 0 < top_k < len(scores):
        return tokens, scores
    keep = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
    return tokens[keep], scores[keep]


def _of_min_p(tokens: Ints, weights: F64, min_p: float) -> tuple[Ints, F64]:
    """The tokens that min_p leaves, and their probabilities. weights: the greatest is 1."""
    if min_p > 0:
        keep = np.flatnonzero(weights >= min_p)
        tokens, weights = tokens[keep], weights[keep]
    return tokens, weights / weights.sum()
