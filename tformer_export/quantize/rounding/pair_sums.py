"""Integer weights whose products with uint8 activations add up exactly on every processor.

x86 without VNNI multiplies uint8 by int8 and adds each two neighbours up in 16 bits, where a larger sum saturates
(VPMADDUBSW); onnxruntime's kernels pair rows 2i and 2i + 1 of the weights. So the weights of a pair add up to 128 at
most, as a size, in each column. Then for all activations a ≤ 255

    |a₁ w₁ + a₂ w₂| ≤ 255 · max(|w₁|, |w₂|, |w₁ + w₂|) ≤ 255 · 128 = 32,640 < 2¹⁵

and integer products are exact on every processor, in every program that opens a file. (Newer processors add up in 32
bits. Arm has the activations around zero: 2 · 128 · 127 < 2¹⁵.)

docs/measured.md, "Eight bits on every processor", has what it costs, and what the other ways would.
"""

from __future__ import annotations

import numpy as np

WEIGHT_MAX = 127
PAIR_MAX = 128


def column_scale(weight: np.ndarray) -> np.ndarray:
    """(N,) float32: the smallest scale with which a column of (K, N) and its pairs are in range; 1 for zeros."""
    largest = np.maximum(weight.max(0), -weight.min(0)) / WEIGHT_MAX
    if len(weight) > 1:
        sums = _pairs(weight).sum(1)
        largest = np.maximum(largest, np.maximum(sums.max(0), -sums.min(0)) / PAIR_MAX)
    return np.where(largest == 0, 1, largest).astype(np.float32)


def round_columns(ratio: np.ndarray) -> np.ndarray:
    """int8 (K, N) nearest to `ratio` (weights over their scales) with weights and pairs in range.

    A pair that is beyond its limit moves there by the shortest way. Time: three passes over the weights. Memory:
    another copy of `ratio` for a moment.
    """
    rounded = np.rint(ratio)
    q: np.ndarray = rounded.clip(-WEIGHT_MAX, WEIGHT_MAX, out=rounded).astype(np.int8)
    del rounded
    pairs, exact = _pairs(q), _pairs(ratio)
    sums = pairs.sum(1, dtype=np.int16)
    at, column = np.nonzero((sums > PAIR_MAX) | (sums < -PAIR_MAX))
    if len(at):
        total = sums[at, column]
        sign, excess = np.sign(total), np.abs(total) - PAIR_MAX
        first, second = ((pairs[at, i, column] - exact[at, i, column]) * sign for i in (0, 1))  # rounded up by
        share = np.rint((excess + first - second) / 2).clip(0, excess).astype(np.int16)
        pairs[at, 0, column] -= (sign * share).astype(np.int8)
        pairs[at, 1, column] -= (sign * (excess - share)).astype(np.int8)
    return q


def _pairs(matrix: np.ndarray) -> np.ndarray:
    """A view (K // 2, 2, N) of (K, N): the rows that are added up in 16 bits. The last of an odd K has no neighbour."""
    inner, columns = matrix.shape
    return matrix[: inner // 2 * 2].reshape(inner // 2, 2, columns)
