"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): what rounding one weight loses, the next make up for.

The result of a product x · w errs by x · (w − ŵ), whose mean square over the data is (w − ŵ)ᵀ H (w − ŵ), H = mean x xᵀ.
Inputs are correlated, so that the error of one row of weights can be cancelled in part by those that are not rounded
yet: row k of the upper Cholesky factor U of H⁻¹ tells how. Rows with the loudest inputs are rounded first (the paper's
"act-order"), while all others can still make up for them; the scales are those of `round_least_error`, fixed
beforehand, so the order is free. Last, each column's scale is fitted to its integers by least squares.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tformer_export.quantize.rounding import pair_sums, round_least_error, round_nearest

DAMPING = 0.01  # of the mean diagonal, added to it: few samples do not tell all of H (the paper's value)
TOGETHER = 128  # rows between two updates of all that follow, which bounds memory traffic and changes nothing


class Hessian:
    """The mean of x xᵀ over the inputs x of a product, (K, K), and what follows from it for any matrix that reads them.

    Memory: another three float64 (K, K) while the factor is made, then one.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix

    @property
    def importance(self) -> np.ndarray:
        """(K,): the mean square of each input."""
        return np.diagonal(self.matrix)

    @cached_property
    def order(self) -> np.ndarray:
        """Rows, the loudest first."""
        return np.argsort(-self.importance, kind="stable")

    @cached_property
    def factor(self) -> np.ndarray:
        """Upper U with UᵀU = (H + λ · mean diagonal · 1)⁻¹, rows in their order. Where that is not definite, more is
        added."""
        one = np.eye(len(self.matrix))
        ordered = self.matrix[np.ix_(self.order, self.order)]
        size = float(self.importance.mean()) or 1.0
        for more in 10.0 ** np.arange(6):
            try:
                return np.linalg.cholesky(np.linalg.inv(ordered + more * DAMPING * size * one)).T
            except np.linalg.LinAlgError:
                continue
        return one


def per_column(weight: np.ndarray, hessian: Hessian) -> tuple[np.ndarray, np.ndarray]:
    """int8 (K, N) and float32 scales (N,), as `round_nearest.per_column` gives them.

    Time: K³ for the factor, once, and K² · N. Memory: a float64 (K, N).
    """
    _, scale = round_least_error.per_column(weight, hessian.importance)
    limits = -pair_sums.WEIGHT_MAX, pair_sums.WEIGHT_MAX
    q = feed_back(weight, hessian, np.broadcast_to(scale, weight.shape), *limits, pair_sums.PAIR_MAX)
    return q, _fitted(weight, q, scale, hessian)


def in_blocks(weight: np.ndarray, hessian: Hessian, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """4-bit q (K, N), multipliers (⌈K / block⌉, N) and float32 scales (N,), as `round_nearest.in_blocks` gives them."""
    _, multipliers, scale = round_least_error.in_blocks(weight, block, hessian.importance)
    of_rows = np.repeat(multipliers, block, 0)[: len(weight)]
    q = feed_back(weight, hessian, of_rows * scale, round_nearest.LOWEST, round_nearest.HIGHEST)
    return q, multipliers, _fitted(weight, round_nearest.expanded(q, multipliers, block), scale, hessian)


def feed_back(
    weight: np.ndarray, hessian: Hessian, steps: np.ndarray, low: int, high: int, pair_max: int | None = None
) -> np.ndarray:
    """Integers (K, N) in low … high for weights (K, N), row by row with error feedback. steps: (K, N).

    pair_max: what rows 2i and 2i + 1 may add up to, as a size (`pair_sums.py`): the second of them to be rounded keeps
    to it, and its error is fed back too.
    """
    order, upper = hessian.order, hessian.factor
    rest = weight[order].astype(np.float64)
    q = np.zeros(weight.shape, np.int8)  # a row that is not rounded yet limits none
    for begin in range(0, len(rest), TOGETHER):
        end = min(begin + TOGETHER, len(rest))
        errors = np.empty((end - begin, rest.shape[1]))
        for k in range(begin, end):
            row, step = order[k], steps[order[k]]
            lowest, highest = np.full(rest.shape[1], low), np.full(rest.shape[1], high)
            if pair_max is not None and row ^ 1 < len(q):
                other = q[row ^ 1].astype(int)
                lowest, highest = np.maximum(low, -pair_max - other), np.minimum(high, pair_max - other)
            q[row] = np.rint(rest[k] / step).clip(lowest, highest)
            errors[k - begin] = (rest[k] - q[row] * step) / upper[k, k]
            rest[k + 1 : end] -= np.outer(upper[k, k + 1 : end], errors[k - begin])
        rest[end:] -= upper[begin:end, end:].T @ errors
    return q


def _fitted(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, hessian: Hessian) -> np.ndarray:
    """(N,): the scale s of least (w − s q)ᵀ H (w − s q); the old one where that is no positive number."""
    q = q.astype(np.float64)
    pulled = hessian.matrix @ q
    across, along = (pulled * weight).sum(0), (pulled * q).sum(0)
    sound = (across > 0) & (along > 0)
    return np.where(sound, across / np.where(sound, along, 1), scale).astype(np.float32)
