"""Forms of integer weights that kernels read, made by numpy from the forms that a file stores.

The results are those of the operators that the exporter writes (`tformer_export/quantize/weight_storage.py`). Each
function writes a matrix into a given array, in blocks that fit into a core's cache: a billion weights take about half a
second of one core. Several matrices can be written at the same time, because numpy holds no lock while it computes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array

BLOCK_COLUMNS, STRIP_COLUMNS = 1024, 64  # of one block, and of one step of its transposition
GROUP_PAIRS = 128  # rows of pairs of 4 bits that are unpacked at once
MIDDLE = 128  # the uint8 that stands for zero in the packed form of 8 bits


def transpose(source: Array, out: Array) -> None:
    """Write the transpose of (N, K) into (K, N), in strips of columns: both sides then stay in the cache."""
    for begin in range(0, len(source), STRIP_COLUMNS):
        out[:, begin : begin + STRIP_COLUMNS] = source[begin : begin + STRIP_COLUMNS].T


def decode(codes: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return the multipliers m and the shifts ⌊m · z / 2⌋ of blocks of 4 bits.

    codes: m − 1 in the lower 3 bits, z in the upper 5.
    """
    m = (codes & 7) + 1
    return m.view(np.int8), ((m * (codes >> 3)) >> 1).view(np.int8)  # at most 8 · 31 / 2


def columns_of_4_bits(packed: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8], out: npt.NDArray[np.int8]) -> None:
    """Write the int8 columns m · q − ⌊m · z / 2⌋ of weights of 4 bits.

    packed: (N, blocks, block / 2). Byte i of a block holds the q, 0 … 15, of its rows 2i and 2i + 1, the first in the
        lower half.
    codes: of `decode`, (N, blocks).
    out: (K, N), with K at most blocks · block: further rows of the last block are left out.
    """
    count, blocks, half = packed.shape
    source, (multipliers, shifts) = packed.reshape(count, blocks * half), decode(np.ascontiguousarray(codes.T))
    width, group = min(BLOCK_COLUMNS, count), max(1, GROUP_PAIRS // half)
    turned, numbers = np.empty((blocks * half, width), np.uint8), np.empty((group * half, width), np.int8)
    for first in range(0, count, width):
        columns = slice(first, min(first + width, count))
        used = columns.stop - first
        transpose(source[columns], turned[:, :used])
        for begin in range(0, blocks, group):
            those = slice(begin, min(begin + group, blocks))
            pairs = turned[those.start * half : those.stop * half, :used]
            rows = out[2 * those.start * half : 2 * those.stop * half]
            signed = numbers[: len(pairs), :used]
            by_block = signed.reshape(-1, half, used)
            unsigned = signed.view(np.uint8)
            for parity in (0, 1):
                half_of_rows = rows[parity::2, columns]
                np.bitwise_and(pairs, 15, out=unsigned) if parity == 0 else np.right_shift(pairs, 4, out=unsigned)
                by_block *= multipliers[those, None, columns]
                by_block -= shifts[those, None, columns]
                half_of_rows[:] = signed[: len(half_of_rows)]


@cache
def tables_of_6_bits() -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return the parts of weights that each byte of the two planes has, (256, 2) and (256, 4).

    A weight is the bitwise OR of its parts: an upper part is a multiple of 4, minus 32.
    """
    byte = np.arange(256)
    upper = np.stack([byte % 16, byte // 16], 1) * 4 - 32
    return upper.astype(np.int8), (byte[:, None] >> np.arange(0, 8, 2) & 3).astype(np.int8)


def rows_of_6_bits(upper: npt.NDArray[np.uint8], lower: npt.NDArray[np.uint8], out: npt.NDArray[np.int8]) -> None:
    """Write the int8 rows of weights of 6 bits.

    upper: (N, 2 · P), two upper parts of 4 bits in a byte, of the weights plus 32. lower: (N, P), four lower parts of 2
        bits. The first of a byte is in its lowest bits.
    out: (N, K), with K at most 4 · P: further numbers of a row are left out.
    """
    count, inner = len(upper), out.shape[1]
    numbers = np.empty((min(STRIP_COLUMNS, count), 4 * lower.shape[1]), np.uint8)
    for begin in range(0, count, STRIP_COLUMNS):
        high, low = upper[begin : begin + STRIP_COLUMNS], lower[begin : begin + STRIP_COLUMNS]
        rows = numbers[: len(high)]
        rows[:, ::2], rows[:, 1::2] = high << 2 & 60, high >> 2 & 60
        for place in range(4):
            rows[:, place::4] |= low >> 2 * place & 3
        rows -= 32
        out[begin : begin + STRIP_COLUMNS] = rows.view(np.int8)[:, :inner]


def columns_of_8_bits(packed: npt.NDArray[np.uint8], out: npt.NDArray[np.int8]) -> None:
    """Write int8 columns.

    packed: (N, blocks, block), the rows of each column, plus 128.
    out: (K, N), with K at most blocks · block: further rows of the last block are left out.
    """
    rows = packed.reshape(len(packed), -1)[:, : len(out)]
    transpose(rows, out.view(np.uint8))
    np.bitwise_xor(out.view(np.uint8), MIDDLE, out=out.view(np.uint8))


def packed_8_bits(rows: npt.NDArray[np.int8], out: npt.NDArray[np.uint8]) -> None:
    """Write the packed form of `columns_of_8_bits`, (N, blocks, block).

    rows: (N, K), and also the transpose of (K, N). Rows that fill the last block are 128, which is zero.
    """
    count, inner = rows.shape
    filled = out.reshape(count, -1)
    for begin in range(0, count, STRIP_COLUMNS):
        strip = filled[begin : begin + STRIP_COLUMNS]
        strip[:, :inner] = rows[begin : begin + STRIP_COLUMNS].view(np.uint8)
        strip[:, :inner] ^= MIDDLE
        strip[:, inner:] = MIDDLE
