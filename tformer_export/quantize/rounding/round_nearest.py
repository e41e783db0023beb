"""Symmetric integer weights, rounded to nearest: 8 bits with a scale for each column, 4 bits in blocks.

int8: w ≈ scale · q, with the smallest scale of a column that keeps its weights and pairs in range (`pair_sums.py`).

int4: w ≈ scale · m · q, in two levels (progressive group quantisation of QServe, Lin et al. 2024). q has 4 bits, m is a
    small integer for each block of a column, and scale is a float for each column. Because m ≤ 8, m · q is an int8 in
    range with one scale for each column too, as kernels for many rows require. An integer m costs little accuracy:
    docs/design/quantization.md#integers-of-the-weights.
"""

from __future__ import annotations

import numpy as np

from tformer_export.quantize.rounding import pair_sums

Integers = tuple[np.ndarray, ...]  # the result of `per_column` or `in_blocks`

MIN_INT4, MAX_INT4 = -8, 7
MAX_BLOCK_MULTIPLIER = pair_sums.MAX_PAIR_SUM // (2 * -MIN_INT4)  # keeps the sum of any pair of m · q in range
BLOCK_ROWS = (128, 64, 32, 16)  # lengths along K; kernels are slower for shorter blocks


def per_column(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a float (K, N) to int8 (K, N) with float32 scales (N,), one for each column.

    A column of zeros has scale 1.
    """
    scale = pair_sums.column_scale(weight)
    return pair_sums.round_columns(weight / scale), scale


def in_blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round a float (K, N) to 4 bits, with the scales that reach the extremes of each block.

    Return q int8 (K, N) in -8 … 7, m uint8 (⌈K / block⌉, N) in 1 … MAX_BLOCK_MULTIPLIER and float32 scales (N,).
    """
    inner, columns = weight.shape
    starts = np.arange(0, inner, block)
    ideal = np.maximum(
        np.maximum.reduceat(weight, starts, 0) / MAX_INT4, np.minimum.reduceat(weight, starts, 0) / MIN_INT4
    )
    scale = ideal.max(0) / MAX_BLOCK_MULTIPLIER
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    m = np.rint(ideal / scale).clip(1, MAX_BLOCK_MULTIPLIER).astype(np.uint8)
    q = np.empty((inner, columns), np.int8)
    for i, start in enumerate(starts):
        rows = slice(start, start + block)
        q[rows] = np.rint(weight[rows] / (scale * m[i])).clip(MIN_INT4, MAX_INT4)
    return q, m, scale


def expand(q: np.ndarray, m: np.ndarray, block: int) -> np.ndarray:
    """Return the int8 weights m · q, (K, N), which have the same scales."""
    weights: np.ndarray = q * np.repeat(m.astype(np.int8), block, 0)[: len(q)]
    return weights


def pack(q: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Return int8 (K, N) as uint8 (N, ⌈K / block⌉, block · bits / 8), the format of MatMulNBits.

    Zero is stored as 2 ** (bits - 1), and K is padded with zeros. Of two numbers in one byte the first is the lower
    half.
    """
    inner, columns = q.shape
    count = -(-inner // block)
    out = np.zeros((columns, count * block), np.int8)
    out[:, :inner] = q.T
    shifted = (out.view(np.uint8) + np.uint8(1 << bits - 1)).reshape(columns, count, block)
    return shifted if bits == 8 else shifted[..., ::2] | shifted[..., 1::2] << 4


def block_rows(inner: int) -> int:
    """Return the longest block that pads K by an eighth at most."""
    return next((block for block in BLOCK_ROWS if -inner % block <= inner / 8), BLOCK_ROWS[-1])
