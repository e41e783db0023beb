"""Selections and splits of items, such as images, that keep all of them, while a model is traced.

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

from tformer_export.sources.image_axes.joined_rows import Rows

_CAT = torch.cat  # which a trace patches


class AllItemsKept(TorchFunctionMode):
    """Replaces selections by a mask of items by all items, and splits by counted sizes by one part.

    Parts along a later axis, behind a first axis of 1, are put on the first axis, until they are joined again: what is
    done with each part alone, such as attention, is done with all at once. They must be of one size.
    Only tensors with a free axis in a trace are concerned. Elsewhere torch works as it does without.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stacked = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and _is_traced(args[0]) and _selects_items(*args):
            return args[0]
        if func in (torch.Tensor.split, torch.split) and (counted := _counted_sizes(args[1])) is not None:
            return (self._whole(args[0], counted, args[2] if len(args) > 2 else kwargs.get("dim", 0)),)
        if func is _CAT and self._stacked and len(args[0]) == 1:
            self._stacked = False
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return args[0][0].movedim(0, axis - 1).flatten(axis - 1, axis).unsqueeze(0)
        return func(*args, **kwargs)

    def _whole(self, tensor: torch.Tensor, sizes: torch.Tensor, axis: int) -> torch.Tensor:
        """Return all parts of a tensor as one."""
        if axis == 0:
            return tensor
        self._stacked = True
        count = sizes.shape[0]
        parts: Any = tensor.squeeze(0)
        stacked: torch.Tensor = parts.unflatten(axis - 1, (count, tensor.shape[axis] // count)).movedim(axis - 1, 0)
        return stacked


def _is_traced(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) and isinstance(tensor.shape[0], torch.SymInt)


def _selects_items(tensor: torch.Tensor, index: Any) -> bool:
    """Return whether an index is a mask of the items, one for each."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == 1
    return is_mask and index.shape[0] == tensor.shape[0]


def _counted_sizes(sizes: Any) -> torch.Tensor | None:
    """Return the sizes of parts that were counted in a tensor; None for other sizes."""
    is_counted = isinstance(sizes, list) and len(sizes) == 1 and isinstance(sizes[0], Rows)
    return sizes[0].tensor if is_counted else None
