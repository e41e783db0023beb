"""bfloat16 in numpy, which has no such type: its bits, as uint16.

Caches and context are only kept, moved and handed back, so that nobody here needs to know the numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BFLOAT16 = "bfloat16"  # as manifests name it
ONNX_BFLOAT16 = 16  # of onnx.TensorProto.DataType


def held_as(dtype: str) -> np.dtype[Any]:
    """The numpy type in which tensors of a manifest's type are held."""
    return np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)


def numbers(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """What is held of a manifest's type, as numpy can reckon with it: bfloat16 is the upper half of a float32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else array
