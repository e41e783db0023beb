"""How the next token is drawn from logits, and what logits are in probabilities."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tformer_runtime.errors import OptionError

if TYPE_CHECKING:
    from tformer_runtime.options import Settings

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def log_normalizer(logits: Floats) -> Floats:
    """log Σ exp(logits) of each row: logits minus this are log-probabilities."""
    # The ufuncs' own reductions: on a small vocabulary the wrappers around them are most of the time.
    top = np.maximum.reduce(logits, -1)
    shifted = np.subtract(logits, top[:, None])
    np.exp(shifted, out=shifted)
    total: Floats = top + np.log(np.add.reduce(shifted, -1))
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
    probabilities: Doubles | None = None


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
        self._temperature = 1.0 if temperature is None else temperature
        self._top_k = top_k or 0
        self._top_p = 1.0 if top_p is None else top_p
        self._min_p = min_p or 0.0

    @classmethod
    def of(cls, settings: Settings, seed: int, index: int, copy: int) -> Sampler:
        """The one that settings ask for."""
        return cls(seed, index, copy, settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    def __call__(self, logits: Floats, guess: Guess | None = None) -> int:
        """A token for (vocabulary,) logits. OptionError if all are -inf.

        guess: what a draft model has drawn from a distribution q of its own. It is taken with the probability
        min(1, p / q), and what comes in its place is drawn from max(0, p - q), so that what comes is distributed as p
        (Leviathan et al. 2023, Chen et al. 2023). A guess that was not drawn changes nothing: what comes may be it.
        """
        tokens, probabilities = self._warped(logits)
        if guess is not None and guess.tokens is not None and guess.probabilities is not None:
            drafts = _of(tokens, guess.tokens, guess.probabilities)
            at = int(np.searchsorted(tokens, guess.token))
            possible = at < len(tokens) and tokens[at] == guess.token
            if possible and self._generator.random() * drafts[at] < probabilities[at]:
                return guess.token
            left = np.maximum(probabilities - drafts, 0)
            probabilities = left if left.any() else probabilities  # where they are the same but for rounding
        return self._drawn(tokens, probabilities)

    def guess(self, logits: Floats) -> Guess:
        """A token that is drawn, and what it was drawn from."""
        tokens, probabilities = self._warped(logits)
        return Guess(self._drawn(tokens, probabilities), tokens, probabilities)

    def _warped(self, logits: Floats) -> tuple[Ints, Doubles]:
        return warped(logits, self._temperature, self._top_k, self._top_p, self._min_p)

    def _drawn(self, tokens: Ints, weights: Doubles) -> int:
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(tokens[min(int(at), len(tokens) - 1)])


def _of(tokens: Ints, others: Ints, probabilities: Doubles) -> Doubles:
    """The probabilities of `tokens` by those of `others`, both in the order of the vocabulary."""
    at = np.minimum(np.searchsorted(others, tokens), len(others) - 1)
    return np.where(others[at] == tokens, probabilities[at], 0.0)


def warped(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[Ints, Doubles]:
    """The tokens that may be drawn and their probabilities, in the order of the vocabulary.

    top_k keeps ties with the k-th. top_p drops the least likely tokens as long as they sum to at most 1 - p. min_p
    drops those less than p times as likely as the likeliest. The likeliest always stays. (Holtzman et al. 2020 and
    Nguyen et al. 2024, as in transformers' TopPLogitsWarper and MinPLogitsWarper.)
    Raises OptionError if all logits are -inf: there is nothing to draw.
    """
    tokens = np.flatnonzero(logits != -np.inf)
    if not len(tokens):
        raise OptionError("the options leave no token that may come next")
    scores = logits[tokens].astype(np.float64) / temperature
    if 0 < top_k < len(scores):
        keep = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
        tokens, scores = tokens[keep], scores[keep]
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(probabilities, kind="stable")
        kept = np.cumsum(probabilities[order]) > 1 - top_p
        kept[-1] = True
        keep = np.sort(order[kept])
        tokens, probabilities = tokens[keep], probabilities[keep] / probabilities[keep].sum()
    if min_p > 0:
        keep = np.flatnonzero(probabilities >= min_p * probabilities.max())
        tokens, probabilities = tokens[keep], probabilities[keep] / probabilities[keep].sum()
    return tokens, probabilities
