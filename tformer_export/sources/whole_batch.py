"""Selections and splits of items, such as pictures, that keep all of them, while a model is traced.

A batch whose requests have different numbers of items is padded with empty ones, and many models remove these again:

    real = (pixels != 0).any(...)                 # (batch · items,)
    features = encoder(pixels[real])
    torch.cat(features.split(counts.tolist()))    # a part for each request

A trace has no values, so it knows neither how many items are real nor how many belong to a request. The runtime encodes
the items of one request at a time and never pads them. So all are real, and the joined parts are the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tformer_export.common.joined_rows import Rows


class AllItemsKept(TorchFunctionMode):
    """Replaces selections by a mask of items by all items, and splits by counted sizes by one part.

    Only tensors whose first axis is free in a trace are concerned. Elsewhere torch works as it does without.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and _is_traced(args[0]) and _selects_items(*args):
            return args[0]
        if func in (torch.Tensor.split, torch.split) and _are_counted(args[1]):
            return (args[0],)
        return func(*args, **(kwargs or {}))


def _is_traced(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) and isinstance(tensor.shape[0], torch.SymInt)


def _selects_items(tensor: torch.Tensor, index: Any) -> bool:
    """Return whether an index is a mask of the items, one for each."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == 1
    return is_mask and index.shape[0] == tensor.shape[0]


def _are_counted(sizes: Any) -> bool:
    """Return whether the sizes of parts were counted from a tensor, one for each request."""
    return isinstance(sizes, list) and len(sizes) == 1 and isinstance(sizes[0], Rows)
