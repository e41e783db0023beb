"""Projections that a model leaves out of forward and applies to its result, as `model.generator(model(src, tgt))`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tformer_runtime.base.errors import SourceError

Head = Callable[[torch.Tensor], torch.Tensor]


def find_heads(module: nn.Module, names: str | Sequence[str] | None) -> list[Head]:
    """Return the submodules or methods of these names, in the order in which they are applied.

    Raises SourceError for a name that the module does not have, and lists the names of its children.
    """
    return [_find(module, name) for name in ([names] if isinstance(names, str) else names or ())]


def _find(module: nn.Module, name: str) -> Head:
    try:
        head: Any = attrgetter(name)(module)
    except (AttributeError, TypeError):
        head = None
    if not callable(head):
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise SourceError(f"{type(module).__name__} has no submodule or method {name!r} for a head: it has {children}")
    return head  # type: ignore[no-any-return]
