"""`PackedWeight`: a matrix whose source stores it in 4-bit integers, which the file keeps as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = (128, 64, 32, 16)  # rows of a block that MatMulNBits reads, the largest first


@dataclass(frozen=True)
class PackedWeight:
    """A matrix (K, N) of 4-bit integers with a scale and a zero point for each block of rows of a column.

    integers: uint8 (K, N), 0 … 15.
    scales: float32 (⌈K / block⌉, N).
    zeros: uint8 (⌈K / block⌉, N), 0 … 15.
    block: the number of rows of a block, one of `BLOCKS`.
    order: int64 (K,), the input that each row is multiplied with; None if they are in the order of the inputs.
    """

    integers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    block: int
    order: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """Return the weights (integers − zeros) · scales as float32 (K, N), in the order of the inputs.

        They are exact if the scales are half precision: a product has 16 significant bits at most.
        """
        rows = len(self.integers)
        zeros, scales = (np.repeat(part, self.block, 0)[:rows] for part in (self.zeros, self.scales))
        weights: np.ndarray = (self.integers.astype(np.float32) - zeros) * scales
        if self.order is None:
            return weights
        ordered = np.empty_like(weights)
        ordered[self.order] = weights
        return ordered

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return integers, scales and zero points as MatMulNBits reads them, padded to whole blocks and bytes.

        These are uint8 (N, blocks, block / 2), float32 (N, blocks) and uint8 (N, ⌈blocks / 2⌉). Of two numbers in one
        byte the first is the lower half.
        """
        (inner, columns), blocks = self.integers.shape, len(self.scales)
        integers = np.zeros((columns, blocks * self.block), np.uint8)
        integers[:, :inner] = self.integers.T
        zeros = np.zeros((columns, blocks + blocks % 2), np.uint8)
        zeros[:, :blocks] = self.zeros.T
        return (
            _halves(integers).reshape(columns, blocks, self.block // 2),
            np.ascontiguousarray(self.scales.T),
            _halves(zeros),
        )


def _halves(numbers: np.ndarray) -> np.ndarray:
    packed: np.ndarray = numbers[:, ::2] | numbers[:, 1::2] << 4
    return packed
