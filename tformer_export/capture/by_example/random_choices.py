"""Random results of operations that choose among few, such as a router's `topk`, for a recording of all that it may do.

A router may send nothing to an expert for the data that are drawn, and forward then leaves the expert out. A recording
with random choices has the operations of all experts. Its numbers are not those of the model: the program that follows
from it is compared with the model's own runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tformer_export.common.fx_nodes import aten

MAX_CHOICES = 1024  # more are not experts, but ids or positions
_OF_ONE = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}


class RandomChoices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces chosen indices. The same operation on an input of the same shape has the same choices again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if operation is aten.topk.default:
            of, count, axis = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim", -1)
        elif operation in _OF_ONE and len(args) > 1 and args[1] is not None:
            of, count, axis = args[0], 1, args[1]
        else:
            return result
        if not of.is_floating_point() or not count < of.shape[axis] <= MAX_CHOICES:
            return result
        indices = _choices(of, count, axis)
        if operation is aten.topk.default:
            return of.gather(axis, indices), indices
        keeps = (args[2] if len(args) > 2 else kwargs.get("keepdim", False)) or indices.dim() == 0
        chosen = indices if keeps else indices.squeeze(axis)
        if isinstance(result, torch.Tensor):
            return chosen
        values = of.gather(axis, indices)
        return values if keeps else values.squeeze(axis), chosen


def _choices(of: torch.Tensor, count: int, axis: int) -> torch.Tensor:
    """Return different random indices into an axis, `count` for each place. All indices occur if places suffice."""
    generator = torch.Generator().manual_seed(of.numel() + count)
    scores = torch.rand(of.movedim(axis, -1).shape, generator=generator).flatten(0, -2)
    places = torch.randperm(len(scores), generator=generator)[: scores.shape[-1]]
    scores[places, torch.arange(len(places))] = 2.0
    indices = scores.topk(count).indices
    return indices.view(*of.movedim(axis, -1).shape[:-1], count).movedim(-1, axis)
