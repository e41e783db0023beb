"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): rounding with error feedback between weights.

The error of a product x · w is x · (w − ŵ), whose mean square over the data is (w − ŵ)ᵀ H (w − ŵ), H = mean x xᵀ.
Inputs are correlated, so weights that are not rounded yet can cancel a part of the error of one row of weights; row k
of the upper Cholesky factor U of H⁻¹ says how. Rows with the largest inputs are rounded first (the paper's
"act-order"), while all others can still compensate for them. The scales are those of `round_least_error`, fixed
beforehand, so the order is free. Last, each column's scale is fitted to its integers by least squares.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tformer_export.quantize.rounding import pair_sums, round_least_error, round_nearest
from tformer_runtime.format.weight_forms import decode

DAMPING = (
    0.01  # share of the mean diagonal that is added to it, because samples determine H in part (the paper's value)
)
LAZY_UPDATE_ROWS = 128  # rows between two updates of all later rows; bounds memory traffic, not the result


class Hessian:
    """The mean of x xᵀ over the inputs x of a product, (K, K), and values that all matrices with these inputs share.

    Memory: three more float64 (K, K) while the factor is computed, then one.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix

    @property
    def importance(self) -> np.ndarray:
        """Return the mean square of each input, (K,)."""
        return np.diagonal(self.matrix)

    @cached_property
    def order(self) -> np.ndarray:
        """Return the row numbers, those with the largest inputs first."""
        return np.argsort(-self.importance, kind="stable")

    @cached_property
    def factor(self) -> np.ndarray:
        """Return the upper U with UᵀU = (H + λ · mean diagonal · 1)⁻¹, for rows in `order`.

        λ is DAMPING, or greater where the matrix is not positive definite.
        """
        identity = np.eye(len(self.matrix))
        ordered = self.matrix[np.ix_(self.order, self.order)]
        size = float(self.importance.mean()) or 1.0
        for damping_factor in 10.0 ** np.arange(6):
            try:
                return np.linalg.cholesky(np.linalg.inv(ordered + damping_factor * DAMPING * size * identity)).T
            except np.linalg.LinAlgError:
                continue
        return identity


def per_column(weight: np.ndarray, hessian: Hessian, bits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 (K, N) and float32 scales (N,) in the format of `round_nearest.per_column`.

    Time: K³ for the factor, once, and K² · N. Memory: a float64 (K, N).
    """
    _, scale = round_least_error.per_column(weight, hessian.importance, bits)
    most = round_nearest.MAX_OF_BITS[bits]
    steps, whole = np.broadcast_to(scale, weight.shape), np.zeros(weight.shape, np.int8)
    limits = np.full(weight.shape, -most), np.full(weight.shape, most)
    q = round_with_feedback(weight, hessian, steps, whole, *limits, pair_sums.MAX_PAIR_SUM)
    return q, _fit_scale(weight, q, scale, hessian)


def in_blocks(
    weight: np.ndarray, hessian: Hessian, blocks: round_nearest.Blocks
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, codes and float32 scales in the format of `round_nearest.in_blocks`."""
    _, codes, scale = round_least_error.in_blocks(weight, blocks, hessian.importance)
    block = blocks.rows
    m, shift = (round_nearest.of_rows(values, block, len(weight)) for values in decode(codes))
    limits = round_nearest.limits(m, shift)
    q = round_with_feedback(weight, hessian, m * scale, shift / m, *limits).astype(np.uint8)
    return q, codes, _fit_scale(weight, round_nearest.expand(q, codes, block), scale, hessian)


def round_with_feedback(
    weight: np.ndarray,
    hessian: Hessian,
    steps: np.ndarray,
    zeros: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    pair_max: int | None = None,
) -> np.ndarray:
    """Round weights w ≈ steps · (q − zeros) to integers q in low … high, row by row with error feedback.

    All arrays are (K, N).
    pair_max: the largest magnitude of the sum of rows 2i and 2i + 1 (`pair_sums.py`). The row of a pair that is rounded
        second keeps to it, and its error is fed back too.
    """
    order, upper = hessian.order, hessian.factor
    rest = weight[order].astype(np.float64)
    q = np.zeros(weight.shape, np.int8)  # a row of zeros, which is not rounded yet, limits no other
    for begin in range(0, len(rest), LAZY_UPDATE_ROWS):
        end = min(begin + LAZY_UPDATE_ROWS, len(rest))
        errors = np.empty((end - begin, rest.shape[1]))
        for k in range(begin, end):
            row = order[k]
            step, zero, lowest, highest = steps[row], zeros[row], low[row], high[row]
            if pair_max is not None and row ^ 1 < len(q):
                other = q[row ^ 1].astype(int)
                lowest, highest = np.maximum(lowest, -pair_max - other), np.minimum(highest, pair_max - other)
            q[row] = np.rint(rest[k] / step + zero).clip(lowest, highest)
            errors[k - begin] = (rest[k] - (q[row] - zero) * step) / upper[k, k]
            rest[k + 1 : end] -= np.outer(upper[k, k + 1 : end], errors[k - begin])
        rest[end:] -= upper[begin:end, end:].T @ errors
    return q


def _fit_scale(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, hessian: Hessian) -> np.ndarray:
    """Return the scale s of least (w − s q)ᵀ H (w − s q), (N,); the old scale where that is not a positive number."""
    q = q.astype(np.float64)
    pulled = hessian.matrix @ q
    across, along = (pulled * weight).sum(0), (pulled * q).sum(0)
    is_positive = (across > 0) & (along > 0)
    return np.where(is_positive, across / np.where(is_positive, along, 1), scale).astype(np.float32)
