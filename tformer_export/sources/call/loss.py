"""The logits of a forward that returns the loss of training alone: the first operand of its cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOSSES = {
    torch.nn.functional.cross_entropy,
    torch.nn.functional.nll_loss,  # of log-probabilities, which are logits of the same distribution
}


class _ReachedLossError(BaseException):
    """Ends forward at its loss. Code of the user that catches exceptions does not catch it."""


class _Watch(TorchFunctionMode):
    """Keeps the logits of the losses that forward computes. ends: whether forward ends at the first."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.found: list[torch.Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _LOSSES:
            self.found.append(args[0] if args else (kwargs or {})["input"])
            if self.ends:
                raise _ReachedLossError
            with torch._C.DisableTorchFunction():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def returns_loss(call: Callable[[], Any]) -> bool:
    """Run forward and return whether its results are numbers without axes, and it computes one cross-entropy."""
    with _Watch(ends=False) as watch:
        returned = call()
    tensors = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(t.dim() == 0 for t in tensors) and len(watch.found) == 1


def logits_of_loss(call: Callable[[], Any]) -> torch.Tensor:
    """Run forward up to its loss and return the logits, with the classes in the last axis.

    Cross-entropy takes (batch · time, classes) or (batch, classes, time).
    """
    with _Watch(ends=True) as watch, suppress(_ReachedLossError):
        call()
    if not watch.found:
        raise ValueError("forward computes no cross-entropy on these inputs")
    logits: torch.Tensor = watch.found[0].movedim(1, -1)
    return logits
