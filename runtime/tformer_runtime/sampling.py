"""How the next token is drawn from logits, and what logits are in probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tformer_runtime.errors import OptionError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def log_normalizer(logits: Floats) -> Floats:
    """log Σ exp(logits) of each row: logits minus this are log-probabilities."""
    # The ufuncs' own reductions: on a small vocabulary the wrappers around them are most of the time.
    top = np.maximum.reduce(logits, -1)
    shifted = np.subtract(logits, top[:, None])
    np.exp(shifted, out=shifted)
    total: Floats = top + np.log(np.add.reduce(shifted, -1))
    return total


class Sampler:
    """Draws from a row's distribution, warped by temperature, then top-k, top-p and min-p (transformers' order).

    The row has a generator of its own, seeded by (seed, its request's index, which sample of the request), one number a
    token, so that its draws do not depend on its neighbours.
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

    def __call__(self, logits: Floats) -> int:
        """A token for (vocabulary,) logits. OptionError if all are -inf."""
        tokens, probabilities = warped(logits, self._temperature, self._top_k, self._top_p, self._min_p)
        cumulative = np.cumsum(probabilities)
        at = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(tokens[min(int(at), len(tokens) - 1)])


def warped(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[Ints, npt.NDArray[np.float64]]:
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
