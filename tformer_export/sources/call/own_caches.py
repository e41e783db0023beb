"""Caches of the user's own, into which forward writes: each call gets new ones, with the rows of its batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_export.common.module_state import tensors_of

MAX_AXES = 4  # that are tried as the batch axis of caches


@contextmanager
def fresh_caches(module: nn.Module, axes: Mapping[str, int], rows: int) -> Iterator[None]:
    """Give a module caches with this number of rows, each as the first row of the present ones, for a while.

    axes: the name of each cache (`module_state.tensors_of`) → its batch axis.
    """
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for path, part in module.named_modules():
            for key, value in [*part._buffers.items(), *vars(part).items()]:
                name = f"{path}.{key}".lstrip(".")
                leaves, form = pytree.tree_flatten(value)
                names = [name + (f"[{i}]" if i else "") for i in range(len(leaves))]
                if not any(n in axes and isinstance(leaf, torch.Tensor) for n, leaf in zip(names, leaves, strict=True)):
                    continue
                new = [_resized(x, axes[n], rows) if n in axes else x for n, x in zip(names, leaves, strict=True)]
                before.append((part, key, value))
                setattr(part, key, pytree.tree_unflatten(new, form))
        yield
    finally:
        for part, key, value in before:
            setattr(part, key, value)


def cache_axes(module: nn.Module, written: list[str], axis: int, rows: int) -> dict[str, int] | None:
    """Return the batch axis of each written tensor; None unless all have this one, and the same numbers in each row."""
    tensors = dict(tensors_of(module))
    for name in written:
        tensor = tensors.get(name)
        if tensor is None or tensor.dim() <= axis or tensor.shape[axis] != rows:
            return None
        if not torch.equal(tensor, tensor.narrow(axis, 0, 1).expand_as(tensor)):
            return None
    return dict.fromkeys(written, axis)


def _resized(cache: torch.Tensor, axis: int, rows: int) -> torch.Tensor:
    sizes = [rows if i == axis else -1 for i in range(cache.dim())]
    return cache.narrow(axis, 0, 1).expand(sizes).clone()
