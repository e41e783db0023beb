"""Integer weights, rounded to nearest: 8 and 6 bits with a scale for each column, 4 bits in blocks.

int8: w ≈ scale · q, with the smallest scale of a column that keeps its weights and pairs in range (`pair_sums.py`).

int6: the same with q in −31 … 31. Files store it in 6 bits; products read it as int8.

int4: w ≈ scale · (m · q − ⌊m · z / 2⌋), in two levels (progressive group quantisation of QServe, Lin et al. 2024).
    q has 4 bits. m is a small whole number and z / 2 a zero point for each block of a column, scale a float for each
    column. The bracket is an int8 of at most 64, so that kernels for many rows get int8 columns with one scale each,
    and no pair of them leaves its range. m and z of a block are one byte, its code. Errors:
    docs/design/quantization.md#integers-of-the-weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tformer_export.common.option_values import LATENCY
from tformer_export.quantize.rounding import pair_sums
from tformer_runtime.format.weight_forms import decode

Integers = tuple[np.ndarray, ...]  # the result of `per_column` or `in_blocks`

MAX_INT4 = 15
MAX_OF_BITS = {8: pair_sums.MAX_WEIGHT, 6: 31}  # the largest magnitude of an integer, without blocks
MAX_BLOCK_MULTIPLIER = 8  # 3 bits of a code
MAX_BLOCK_ZERO = 31  # 5 bits of a code: a zero point in half steps
MAX_COLUMN_WEIGHT = pair_sums.MAX_PAIR_SUM // 2  # keeps the sum of any pair in range
BLOCK_ROWS = (128, 64, 32, 16)  # lengths along K. MatMulNBits is slower for shorter blocks
INT4_ROWS, FEW_ROWS_INT4_ROWS = (16,), (32, 16)  # of 4 bits, without and with a form for few rows


@dataclass(frozen=True)
class Blocks:
    """The blocks of a matrix of 4 bits.

    rows: numbers of a block along K.
    has_whole_zeros: whether zero points are whole numbers, as MatMulNBits requires.
    """

    rows: int
    has_whole_zeros: bool = False


def per_column(weight: np.ndarray, bits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Round a float (K, N) to int8 (K, N) with float32 scales (N,), one for each column.

    bits: 8 or 6. A column of zeros has scale 1.
    """
    scale = pair_sums.column_scale(weight, MAX_OF_BITS[bits])
    return pair_sums.round_columns(weight / scale, MAX_OF_BITS[bits]), scale


def in_blocks(weight: np.ndarray, blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round a float (K, N) to 4 bits, with steps that reach the extremes of each block.

    Return q uint8 (K, N) in 0 … 15, codes uint8 (⌈K / rows⌉, N) and float32 scales (N,).
    """
    low, high = extremes(weight, blocks.rows)
    scale = scale_in_reach(low, high)
    m = np.rint((high - low) / (MAX_INT4 * scale)).clip(1, MAX_BLOCK_MULTIPLIER)
    z = zeros_of_middle(low + high, m * scale, 2 if blocks.has_whole_zeros else 1, np.rint)
    codes = encode(m, z)
    return round_to_codes(weight, codes, scale, blocks.rows), codes, scale


def extremes(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest of the weights of each block and zero, (blocks, N)."""
    starts = np.arange(0, len(weight), block)
    low, high = np.minimum.reduceat(weight, starts), np.maximum.reduceat(weight, starts)
    return np.minimum(low, 0), np.maximum(high, 0)


def scale_in_reach(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the least scales (N,) with which blocks reach their extremes (blocks, N); 1 for columns of zeros."""
    steps = (high - low).max(0) / (MAX_INT4 * MAX_BLOCK_MULTIPLIER)
    scale = np.maximum(steps, np.maximum(high, -low).max(0) / MAX_COLUMN_WEIGHT)
    return np.where(scale == 0, 1, scale).astype(np.float32)


def zeros_of_middle(
    twice_middle: np.ndarray, step: np.ndarray, unit: int, rounding: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the z, multiples of `unit`, whose 16 steps lie around a middle. rounding: np.rint, np.floor or np.ceil."""
    exact = (MAX_INT4 - twice_middle / step) / unit
    zeros: np.ndarray = (rounding(exact) * unit).clip(0, MAX_BLOCK_ZERO // unit * unit)
    return zeros


def encode(m: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return the codes uint8 of multipliers 1 … 8 and zero points 0 … 31, as `decode` reads them."""
    return (z.astype(np.uint8) << 3) | (m.astype(np.uint8) - 1)


def of_rows(values: np.ndarray, block: int, inner: int) -> np.ndarray:
    """Return the values of blocks (blocks, N) for each row, (K, N)."""
    return np.repeat(values, block, 0)[:inner]


def round_to_codes(weight: np.ndarray, codes: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """Return the q of given codes and scales, uint8 (K, N)."""
    m, shift = (of_rows(values, block, len(weight)) for values in decode(codes))
    low, high = limits(m, shift)
    q: np.ndarray = np.rint((weight / scale + shift) / m).clip(low, high).astype(np.uint8)
    return q


def limits(m: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest q whose m · q − shift is at most MAX_COLUMN_WEIGHT in size."""
    m, shift = m.astype(np.int16), shift.astype(np.int16)
    low, high = -((MAX_COLUMN_WEIGHT - shift) // m), (MAX_COLUMN_WEIGHT + shift) // m
    return low.clip(0, MAX_INT4), high.clip(0, MAX_INT4)


def expand(q: np.ndarray, codes: np.ndarray, block: int) -> np.ndarray:
    """Return the int8 weights m · q − ⌊m · z / 2⌋, (K, N), which have the same scales."""
    m, shift = (of_rows(values, block, len(q)) for values in decode(codes))
    weights: np.ndarray = q.view(np.int8) * m - shift
    return weights


def pack(q: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Return the integers (K, N) as uint8 (N, ⌈K / block⌉, block · bits / 8), the format of MatMulNBits.

    q: int8, stored plus 128; of 4 bits uint8. Of two numbers in one byte the first is the lower half. Rows that fill
    the last block are 128 or 8.
    """
    inner, columns = q.shape
    count = -(-inner // block)
    out = np.full((columns, count * block), 1 << bits - 1, np.uint8)
    out[:, :inner] = q.T if bits == 4 else q.T.view(np.uint8) ^ 128
    stored = out.reshape(columns, count, block)
    return stored if bits == 8 else stored[..., ::2] | stored[..., 1::2] << 4


def pack_6_bits(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers int8 (K, N) as two planes, uint8 (N, ⌈K / 4⌉ · 2) and (N, ⌈K / 4⌉).

    A byte of the first has the upper 4 bits of two numbers q + 32, a byte of the second the lower 2 bits of four. The
    first number is in the lowest bits. Rows that fill the last four are 0.
    """
    inner, columns = q.shape
    raised = np.full((columns, -(-inner // 4) * 4), 32, np.uint8)
    raised[:, :inner] += q.T.view(np.uint8)
    upper, lower = raised >> 2, (raised & 3).reshape(columns, -1, 4) << np.array([0, 2, 4, 6], np.uint8)
    return upper[:, ::2] | upper[:, 1::2] << 4, np.bitwise_or.reduce(lower, -1)


def block_rows(inner: int, choices: Sequence[int] = BLOCK_ROWS) -> int:
    """Return the longest block that pads K by an eighth at most."""
    return next((rows for rows in choices if -inner % rows <= inner / 8), choices[-1])


def int4_blocks(inner: int, optimize_for: str) -> Blocks:
    """Return the blocks of a matrix of 4 bits with K = inner. Files for latency have a form for few rows."""
    has_few_rows_form = optimize_for == LATENCY
    return Blocks(block_rows(inner, FEW_ROWS_INT4_ROWS if has_few_rows_form else INT4_ROWS), has_few_rows_form)
