"""Symmetric integer weights: of 8 bits with a scale a column, of 4 with a scale a block of a column.

int8: w ≈ scale · q, with the smallest scale of a column that keeps its weights and pairs in range (`pair_sums.py`).

int4: w ≈ scale · m · q, in two levels (QServe, Lin et al. 2024, calls it progressive group quantisation): q has 4 bits,
m is a small integer for each block of a column and scale a float for each column. Because m ≤ 8, m · q is an int8 in
range with one scale a column too, which is what kernels for many rows want. That m is an integer costs little: relative
rms error on normal weights with a float scale a block and with this, 0.1118 and 0.1126 in blocks of 128, 0.0920 and
0.0948 in blocks of 32 (int8: 0.0116; K = 4096).
"""

from __future__ import annotations

import numpy as np

from tformer_export.quantize.rounding import pair_sums

Integers = tuple[np.ndarray, ...]  # what `per_column` or `in_blocks` gives

LOWEST, HIGHEST = -8, 7  # of 4 bits
MOST = pair_sums.PAIR_MAX // (2 * -LOWEST)  # of a block's integer, so that any pair of m · q is in range
BLOCKS = (128, 64, 32, 16)  # lengths along K, best first; kernels take longer for shorter ones


def per_column(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) float → int8 (K, N) and float32 scales (N,), one a column; a column of zeros has scale 1."""
    scale = pair_sums.column_scale(weight)
    return pair_sums.round_columns(weight / scale), scale


def in_blocks(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(K, N) float → q int8 (K, N) in -8 … 7, m uint8 (⌈K / block⌉, N) in 1 … MOST and float32 scales (N,).

    Rounded to nearest, with the scales that reach each block's extremes.
    """
    inner, columns = weight.shape
    starts = np.arange(0, inner, block)
    ideal = np.maximum(
        np.maximum.reduceat(weight, starts, 0) / HIGHEST, np.minimum.reduceat(weight, starts, 0) / LOWEST
    )
    scale = ideal.max(0) / MOST
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    m = np.rint(ideal / scale).clip(1, MOST).astype(np.uint8)
    q = np.empty((inner, columns), np.int8)
    for i, start in enumerate(starts):
        rows = slice(start, start + block)
        q[rows] = np.rint(weight[rows] / (scale * m[i])).clip(LOWEST, HIGHEST)
    return q, m, scale


def expanded(q: np.ndarray, m: np.ndarray, block: int) -> np.ndarray:
    """The int8 weights m · q, (K, N): with a column's scale they are what q and m are with it."""
    whole: np.ndarray = q * np.repeat(m.astype(np.int8), block, 0)[: len(q)]
    return whole


def packed(q: np.ndarray, bits: int, block: int) -> np.ndarray:
    """int8 (K, N) → uint8 (N, ⌈K / block⌉, block · bits / 8), as MatMulNBits reads it.

    Numbers stand around 2 ** (bits - 1), K is filled up with zeros, and of two in one byte the first is the lower half.
    """
    inner, columns = q.shape
    count = -(-inner // block)
    out = np.zeros((columns, count * block), np.int8)
    out[:, :inner] = q.T
    raised = (out.view(np.uint8) + np.uint8(1 << bits - 1)).reshape(columns, count, block)
    return raised if bits == 8 else raised[..., ::2] | raised[..., 1::2] << 4


def block_of(inner: int) -> int:
    """The longest block that fills K up by an eighth at most."""
    return next((block for block in BLOCKS if -inner % block <= inner / 8), BLOCKS[-1])
