"""Writes of a number to elements whose count a trace does not know. A mask fills them.

- A triangle of a matrix of free sizes: `i = torch.triu_indices(t, t, 1)`; `scores[..., i[0], i[1]] = -inf`. While
  `masked_writes` is active, the functions give an object in place of the indices. Any other use of it fails.
- Positions from or up to a number that is read from data: `mask[row, lengths[row]:] = 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Triangle:
    """The indices of a triangle: (rows, columns)."""

    sizes: tuple[Any, Any]
    offset: int
    cut: Callable[[torch.Tensor, int], torch.Tensor]

    def __getitem__(self, axis: int) -> tuple[_Triangle, int]:
        return self, axis

    def __iter__(self) -> Iterator[tuple[_Triangle, int]]:
        return iter((self[0], self[1]))

    @property
    def mask(self) -> torch.Tensor:
        """The triangle, (rows, columns) bool."""
        return self.cut(torch.ones(*self.sizes, dtype=torch.bool), self.offset)


@contextmanager
def masked_writes() -> Iterator[None]:
    """Patch `torch.triu_indices`, `torch.tril_indices` and writes to tensors.

    The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    tensor_class: Any = torch.Tensor
    original, upper, lower = tensor_class.__setitem__, torch.triu_indices, torch.tril_indices

    def write(tensor: torch.Tensor, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        triangle = keys[-1][0] if isinstance(keys[-1], tuple) else None
        if triangle is not None and keys[-2:] == (*triangle,) and keys[:-2] in ((), (Ellipsis,)):
            tensor.masked_fill_(triangle.mask, value)
        elif isinstance(value, (int, float)) and any(map(_reads_bounds, keys)) and all(map(_is_plain, keys)):
            written = tensor[tuple(slice(None) if isinstance(part, slice) else part for part in keys)]
            written.masked_fill_(_between(written, [part for part in keys if isinstance(part, slice)]), value)
        else:
            original(tensor, key, value)

    tensor_class.__setitem__ = write
    torch.triu_indices = _indices(upper, torch.triu)
    torch.tril_indices = _indices(lower, torch.tril)
    try:
        yield
    finally:
        tensor_class.__setitem__, torch.triu_indices, torch.tril_indices = original, upper, lower


def _reads_bounds(part: Any) -> bool:
    return isinstance(part, slice) and any(isinstance(bound, torch.Tensor) for bound in (part.start, part.stop))


def _is_plain(part: Any) -> bool:
    """Return whether a part of an index is a number or a slice without steps."""
    return (isinstance(part, slice) and part.step in (None, 1)) or isinstance(part, (int, torch.SymInt))


def _between(written: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Return the mask of the elements within slices of the first axes, whose bounds are not negative."""
    mask = torch.ones((), dtype=torch.bool)
    for axis, part in enumerate(slices):
        positions = torch.arange(written.shape[axis]).reshape(-1, *[1] * (written.dim() - axis - 1))
        for bound, holds in ((part.start, torch.ge), (part.stop, torch.lt)):
            if bound is not None:
                mask = mask & holds(positions, bound)
    return mask


def _indices(original: Callable[..., torch.Tensor], cut: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def indices(row: Any, col: Any, offset: int = 0, **others: Any) -> Any:
        if not any(isinstance(size, torch.SymInt) for size in (row, col)):
            return original(row, col, offset, **others)
        return _Triangle((row, col), offset, cut)

    return indices
