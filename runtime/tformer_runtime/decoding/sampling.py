"""Draw the next token from logits, and turn logits into probabilities."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tformer_runtime.backend.sampling_graph import TOP_LOGITS_COUNT, TopLogits
from tformer_runtime.base.arrays import F32, F64, Ints
from tformer_runtime.base.errors import OptionError

if TYPE_CHECKING:
    from tformer_runtime.decoding.options import Settings


# The maximum relative error of a sum that a device computes in float32. In a tree of 1024 threads each adds up some
# hundred numbers and rounds by 2⁻²⁴ each time, 2e-5 in all. The error of an exponential is smaller: 2⁻²², and as much
# for its argument.
DEVICE_SUM_TOLERANCE = 1e-4
_BLOCK_VALUES = 1 << 17  # logits that are processed together; faster than all at once: docs/design/runtime.md
_HOST_SUM_TOLERANCE = 1e-9  # the maximum relative error in float64 of sums over a vocabulary, and of exponentials


def log_normalizer(logits: F32, top: F32 | None = None) -> F32:
    """Return log Σ exp(logits) of each row; logits minus this are log-probabilities. top: the maximum of each row, if
    it is known.

    Cost: one pass over the logits. They are processed block by block, so that each block stays in the processor's
    cache.
    """
    rows = max(1, _BLOCK_VALUES // logits.shape[1])
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


def seed_or_random(settings: Settings) -> int:
    """Return the seed of the settings, or a random seed at each call if they have none."""
    return int.from_bytes(os.urandom(8), "big") if settings.seed is None else settings.seed


class Guess(Struct, frozen=True):
    """A guess for the next token.

    tokens, probabilities: the distribution that it was drawn from, in the order of the vocabulary; None if it was not
        drawn.
    """

    token: int
    tokens: Ints | None = None
    probabilities: F64 | None = None


class Sampler:
    """Draws from a row's distribution, after temperature, top-k, top-p and min-p (in transformers' order).

    Each row has its own random generator, so that its draws do not depend on other rows. The generator is seeded by the
    seed, the index of the request and the number of the sample. It gives one number for a token, or two if the guess of
    a draft model is refused.
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
    def from_settings(cls, settings: Settings, seed: int, index: int, copy: int) -> Sampler:
        """Return the sampler for settings. copy: the number of the sample."""
        return cls(seed, index, copy, settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    def __call__(self, logits: F32, guess: Guess | None = None) -> int:
        """Return a token for (vocabulary,) logits. Raise OptionError if all logits are -inf.

        guess: a token that a draft model has drawn from its distribution q. It is accepted with the probability min(1,
            p / q). Otherwise the token is drawn from max(0, p - q), so that tokens have the distribution p (Leviathan
            et al. 2023, Chen et al. 2023). A guess that was not drawn has no influence.
        """
        tokens, probabilities = self._warp(logits)
        if guess is not None and guess.tokens is not None and guess.probabilities is not None:
            draft_probabilities = _probabilities_of(tokens, guess.tokens, guess.probabilities)
            position = int(np.searchsorted(tokens, guess.token))
            is_possible = position < len(tokens) and tokens[position] == guess.token
            if is_possible and self._generator.random() * draft_probabilities[position] < probabilities[position]:
                return guess.token
            rest = np.maximum(probabilities - draft_probabilities, 0)
            probabilities = rest if rest.any() else probabilities  # equal distributions, except for rounding
        return self._draw(tokens, probabilities)

    def guess(self, logits: F32) -> Guess:
        """Draw a token, and return it with its distribution."""
        tokens, probabilities = self._warp(logits)
        return Guess(self._draw(tokens, probabilities), tokens, probabilities)

    @property
    def draws_from_few(self) -> bool:
        """Whether few tokens are possible as a rule, so that the top logits may determine the token."""
        return 0 < self._top_k < TOP_LOGITS_COUNT or (not self._top_k and (self._top_p < 1 or self._min_p > 0))

    def draw_from_top_logits(self, top: TopLogits) -> int | None:
        """Return the token that a call with the whole row would return. If the top logits do not determine it, return
        None and draw nothing.
        """
        warped = warp_top_logits(top, self.temperature, self._top_k, self._top_p, self._min_p)
        return None if warped is None else self._draw(*warped)

    def _warp(self, logits: F32) -> tuple[Ints, F64]:
        return warp(logits, self.temperature, self._top_k, self._top_p, self._min_p)

    def _draw(self, tokens: Ints, weights: F64) -> int:
        cumulative = np.cumsum(weights)
        position = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(tokens[min(int(position), len(tokens) - 1)])


def _probabilities_of(tokens: Ints, others: Ints, probabilities: F64) -> F64:
    """Return the probabilities of `tokens` in the distribution of `others`; both are in the order of the vocabulary."""
    positions = np.minimum(np.searchsorted(others, tokens), len(others) - 1)
    return np.where(others[positions] == tokens, probabilities[positions], 0.0)


def warp(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[Ints, F64]:
    """Return the tokens that can be drawn and their probabilities, in the order of the vocabulary.

    top_k keeps ties with the k-th token. top_p drops the least likely tokens as long as their sum is at most 1 - p.
    min_p drops the tokens that are less than p times as likely as the likeliest. The likeliest token always stays
    (Holtzman et al. 2020 and Nguyen et al. 2024, as in transformers' TopPLogitsWarper and MinPLogitsWarper). Raise
    Raise OptionError if all logits are -inf. Cost: top_p sorts the vocabulary.
    """
    tokens = np.flatnonzero(logits != -np.inf)
    if not len(tokens):
        raise OptionError("the options leave no token that may come next")
    scores = logits[tokens].astype(np.float64) / temperature
    return _warp_scores(*_keep_top_k(tokens, scores, top_k), top_p, min_p)


def _warp_scores(tokens: Ints, scores: F64, top_p: float, min_p: float) -> tuple[Ints, F64]:
    """Return the tokens that top_p and min_p keep, and their probabilities. scores: logits over the temperature."""
    weights = np.exp(scores - scores.max())
    if top_p < 1:
        order = np.argsort(weights, kind="stable")
        kept = np.cumsum(weights[order]) > (1 - top_p) * weights.sum()
        kept[-1] = True
        keep = np.sort(order[kept])
        tokens, weights = tokens[keep], weights[keep]
    return _keep_min_p(tokens, weights, min_p)


def warp_top_logits(
    top: TopLogits, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Ints, F64] | None:
    """Return the same as `warp` for the whole row, bit for bit. Return None if a token that is not among the top logits
    may be drawn, or if this is uncertain. Cost: a pass over the top logits, and for top_p a sort.

    The result depends only on which tokens can be drawn: in both cases their weights are exp((logit - maximum) /
    temperature). The top logits determine the tokens of top_k and min_p. top_p needs the total weight of the row, which
    is known to within DEVICE_SUM_TOLERANCE. If this tolerance could matter, the function returns None.
    """
    if top.complete or top.logits.min() == -np.inf:
        tokens, probabilities = warp(top.logits, temperature, top_k, top_p, min_p)
        return top.tokens[tokens], probabilities
    scores = top.logits.astype(np.float64) / temperature
    min_score, max_score = scores.min(), scores.max()  # other tokens may have up to min_score
    if top_k:
        tokens, scores = _keep_top_k(top.tokens, scores, top_k)
        if scores.min() <= min_score:  # a token that is not among the top logits may be kept
            return None
        return _warp_scores(tokens, scores, top_p, min_p)
    tokens, weights = top.tokens, np.exp(scores - max_score)
    max_other_weight = weights.min() * (1 + _HOST_SUM_TOLERANCE)
    if top_p < 1:
        order = np.argsort(weights, kind="stable")
        likelier_weight = np.cumsum(weights[order[::-1]])[::-1] - weights[order]  # of the likelier tokens
        likelier_weight[-1] = 0
        is_kept, is_dropped = (
            likelier_weight < (top_p - DEVICE_SUM_TOLERANCE) * top.total,
            likelier_weight >= (top_p + DEVICE_SUM_TOLERANCE) * top.total,
        )
        is_kept[-1], is_dropped[-1] = True, False
        keep = np.sort(order[is_kept])
        if not (is_kept | is_dropped).all() or weights[keep].min() <= max_other_weight:
            return None
        tokens, weights = tokens[keep], weights[keep]
    elif min_p <= max_other_weight:
        return None
    return _keep_min_p(tokens, weights, min_p)


def _keep_top_k(tokens: Ints, scores: F64, top_k: int) -> tuple[Ints, F64]:
    if not 0 < top_k < len(scores):
        return tokens, scores
    keep = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
    return tokens[keep], scores[keep]


def _keep_min_p(tokens: Ints, weights: F64, min_p: float) -> tuple[Ints, F64]:
    """Return the tokens that min_p keeps, and their probabilities. weights: the maximum is 1."""
    if min_p > 0:
        keep = np.flatnonzero(weights >= min_p)
        tokens, weights = tokens[keep], weights[keep]
    return tokens, weights / weights.sum()
