"""Slices are operations of a recording even where they take everything.

torch leaves out a slice that takes everything. So `x[:, :n]` of n positions would have no operation, and that of
another length would have one.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np
import torch

_MASKS = torch.bool, torch.uint8


def take_slices(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, Any]:
    """Return a tensor of which the slices of a key are taken, and the rest of the key."""
    parts = list(key) if isinstance(key, tuple) else [key]
    consumed = [part is not None and part is not Ellipsis for part in parts]
    if any(map(_takes_several_axes, parts)):
        return tensor, key
    axis = 0
    for i, part in enumerate(parts):
        if isinstance(part, slice) and part != slice(None):
            bounds = part.start, part.stop, part.step
            if any(isinstance(bound, torch.Tensor) for bound in bounds):
                return tensor, tuple(parts)
            start, stop, step = (None if bound is None else operator.index(bound) for bound in bounds)
            tensor = torch.ops.aten.slice.Tensor(
                tensor, axis, 0 if start is None else start, sys.maxsize if stop is None else stop, step or 1
            )
            parts[i] = slice(None)
        axis = axis + consumed[i] if part is not Ellipsis else tensor.dim() - sum(consumed[i:])
    return tensor, tuple(parts)


def _takes_several_axes(part: Any) -> bool:
    """Return whether a part of a key may be a mask, which takes as many axes as it has."""
    return isinstance(part, (bool, list, np.ndarray)) or (isinstance(part, torch.Tensor) and part.dtype in _MASKS)
