"""bfloat16 in numpy, which lacks that type: its bits are stored as uint16.

The runtime only stores, moves and returns caches and context, so that it rarely needs their numeric values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BFLOAT16 = "bfloat16"  # its name in manifests


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that stores tensors of a manifest's type."""
    return np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)


def to_numeric(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return stored values of a manifest's type as numbers. bfloat16 is the upper half of a float32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else array
