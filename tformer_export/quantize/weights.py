"""Symmetric int8 weights: q = round(w / s), s = max |w| / 127 over what shares a scale."""

from __future__ import annotations

import numpy as np

LEVELS = 127


def per_column(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) float → int8 (K, N) and float32 scales (N,), one a column; a column of zeros has scale 1."""
    scale = np.maximum(weight.max(0), -weight.min(0)) / LEVELS
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    ratio = weight / scale  # the one copy
    return np.rint(ratio, out=ratio).clip(-LEVELS, LEVELS, out=ratio).astype(np.int8), scale
