"""Loops over the rows of a batch that only join the rows again: `torch.cat(list(x), 0)` and `torch.stack(list(x))`.

A trace has no number of rows, so a Python loop over rows would fix it. But models that handle inputs of several sizes
often split a tensor into a list of rows, whose joined rows are the tensor again. While `rows_joined` is active,
iterating over a tensor with a free first axis gives one object that stands for all rows. `torch.cat` and `torch.stack`
take it; after any other use the trace is repeated without. A trace without the patch fixes such an axis, which
fails too: no trace that succeeds without the patch has another result with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tformer_export.sources.image_axes.joined_rows import Rows


@dataclass
class RowUse:
    """The loops over rows that `rows_joined` replaced, as what each of them got."""

    rows: list[Rows] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return bool(self.rows)

    @property
    def wrong(self) -> bool:
        """Whether one did anything else than join the rows again, such as compare them."""
        return any(rows.is_misused or not rows.is_taken for rows in self.rows)


@contextmanager
def rows_joined() -> Iterator[RowUse]:
    """Patch iteration over tensors, `torch.cat` and `torch.stack`.

    The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    use = RowUse()
    tensor_class: Any = torch.Tensor
    originals = (tensor_class.__iter__, tensor_class.__len__, torch.cat, torch.stack)
    original_iter, original_len, original_cat, original_stack = originals
    iterated: list[torch.Tensor] = []

    def iterate(tensor: torch.Tensor) -> Iterator[Any]:
        if not tensor.dim() or not isinstance(tensor.shape[0], torch.SymInt):
            return iter(original_iter(tensor))
        use.rows.append(Rows(tensor))
        iterated[:] = [tensor]
        return iter(use.rows[-1:])

    def length(tensor: torch.Tensor) -> int:
        if iterated and iterated[0] is tensor:  # list() asks for a hint after iter(); an error means "unknown"
            iterated.clear()
            raise TypeError
        return int(original_len(tensor))

    def cat(tensors: Any, dim: int = 0, **others: Any) -> torch.Tensor:
        rows = _only_rows(tensors)
        if rows is None:
            return original_cat(tensors, dim, **others)
        return rows.flatten(0, 1) if dim == 0 else rows.movedim(0, dim).flatten(dim, dim + 1)

    def stack(tensors: Any, dim: int = 0, **others: Any) -> torch.Tensor:
        rows = _only_rows(tensors)
        return original_stack(tensors, dim, **others) if rows is None else rows.movedim(0, dim)

    tensor_class.__iter__, tensor_class.__len__, torch.cat, torch.stack = iterate, length, cat, stack
    try:
        yield use
    finally:
        tensor_class.__iter__, tensor_class.__len__, torch.cat, torch.stack = originals


def _only_rows(tensors: Any) -> torch.Tensor | None:
    """Return the tensor whose rows are all that is to be joined; None for other tensors."""
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1 and isinstance(tensors[0], Rows):
        return tensors[0].tensor
    return None
