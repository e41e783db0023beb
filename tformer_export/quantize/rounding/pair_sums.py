"""Integer weights whose products with uint8 activations are exact on every processor.

x86 processors without VNNI multiply uint8 by int8 and add each two neighbours in 16 bits, where a larger sum saturates
(VPMADDUBSW). onnxruntime's kernels pair rows 2i and 2i + 1 of the weights. So the magnitude of a pair's sum is limited
to 128 in each column. Then for all activations a ≤ 255

    |a₁ w₁ + a₂ w₂| ≤ 255 · max(|w₁|, |w₂|, |w₁ + w₂|) ≤ 255 · 128 = 32,640 < 2¹⁵

and integer products are exact on every processor, in every program that opens a file. Newer processors add in 32 bits.
Arm has activations around zero: 2 · 128 · 127 < 2¹⁵.

The cost, and alternatives: docs/design/quantization.md#eight-bits-on-every-processor.
"""

from __future__ import annotations

import numpy as np

MAX_WEIGHT = 127
MAX_PAIR_SUM = 128


def column_scale(weight: np.ndarray, max_weight: int = MAX_WEIGHT) -> np.ndarray:
    """Return the smallest scale that keeps each column of (K, N) and its pairs in range, float32 (N,); 1 for zeros.

    max_weight: the largest magnitude of an integer.
    """
    largest = np.maximum(weight.max(0), -weight.min(0)) / max_weight
    if len(weight) > 1 and 2 * max_weight > MAX_PAIR_SUM:
        sums = _pairs(weight).sum(1)
        largest = np.maximum(largest, np.maximum(sums.max(0), -sums.min(0)) / MAX_PAIR_SUM)
    return np.where(largest == 0, 1, largest).astype(np.float32)


def round_columns(ratio: np.ndarray, max_weight: int = MAX_WEIGHT) -> np.ndarray:
    """Round ratios of weights to scales to the nearest int8 (K, N) with weights and pairs in range.

    A pair beyond its limit moves there by the shortest way. Time: three passes over the weights. Memory: one more copy
    of `ratio` while it runs.
    """
    rounded = np.rint(ratio)
    q: np.ndarray = rounded.clip(-max_weight, max_weight, out=rounded).astype(np.int8)
    del rounded
    if 2 * max_weight <= MAX_PAIR_SUM:
        return q
    pairs, exact = _pairs(q), _pairs(ratio)
    sums = pairs.sum(1, dtype=np.int16)
    pair_index, column = np.nonzero((sums > MAX_PAIR_SUM) | (sums < -MAX_PAIR_SUM))
    if len(pair_index):
        total = sums[pair_index, column]
        sign, excess = np.sign(total), np.abs(total) - MAX_PAIR_SUM
        first, second = (
            (pairs[pair_index, i, column] - exact[pair_index, i, column]) * sign for i in (0, 1)
        )  # rounding error
        share = np.rint((excess + first - second) / 2).clip(0, excess).astype(np.int16)
        pairs[pair_index, 0, column] -= (sign * share).astype(np.int8)
        pairs[pair_index, 1, column] -= (sign * (excess - share)).astype(np.int8)
    return q


def _pairs(matrix: np.ndarray) -> np.ndarray:
    """Return a view (K // 2, 2, N) of (K, N): the rows that are added in 16 bits.

    The last row of an odd K has no neighbour.
    """
    inner, columns = matrix.shape
    return matrix[: inner // 2 * 2].reshape(inner // 2, 2, columns)
