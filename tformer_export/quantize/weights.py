"""Symmetric int8 weights: q = round(w / s), s = max |w| / 127 over what shares a scale."""

from __future__ import annotations

import numpy as np

LEVELS = 127
ZERO = 128  # of the unsigned form


def per_column(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) float → int8 (K, N) and float32 scales (N,), one a column."""
    scale = np.abs(weight).max(0) / LEVELS
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return np.rint(weight / scale).clip(-LEVELS, LEVELS).astype(np.int8), scale


def blocked(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) float → uint8 (N, blocks, block) around ZERO and float32 scales (N, blocks); K is padded with zeros."""
    inner, outer = weight.shape
    blocks = -(-inner // block)
    padded = np.zeros((outer, blocks * block), np.float32)
    padded[:, :inner] = weight.T
    rows = padded.reshape(outer, blocks, block)
    scale = np.abs(rows).max(-1) / LEVELS
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return (np.rint(rows / scale[..., None]).clip(-LEVELS, LEVELS) + ZERO).astype(np.uint8), scale


def block_size(inner: int) -> int:
    """The largest block up to 128 that divides the inner dimension, at least 16 (the operator's least)."""
    return next((b for b in (128, 64, 32, 16) if inner % b == 0), 16)
