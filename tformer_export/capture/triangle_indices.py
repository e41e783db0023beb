"""Writes to a triangle of a matrix of free sizes: `i = torch.triu_indices(t, t, 1)`; `scores[..., i[0], i[1]] = -inf`.

A trace does not know the number of these indices. While `triangles_filled` is active, the functions give an object in
their place, and such a write fills the triangle by a mask. Any other use of the object fails, and so does the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
def triangles_filled() -> Iterator[None]:
    """Patch `torch.triu_indices`, `torch.tril_indices` and writes to tensors.

    The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    tensor_class: Any = torch.Tensor
    write, upper, lower = tensor_class.__setitem__, torch.triu_indices, torch.tril_indices

    def write_triangle(tensor: torch.Tensor, key: Any, value: Any) -> None:
        triangle = key[-1][0] if isinstance(key, tuple) and len(key) > 1 and isinstance(key[-1], tuple) else None
        if triangle is None or key[-2:] != (triangle[0], triangle[1]) or key[:-2] not in ((), (Ellipsis,)):
            write(tensor, key, value)
        else:
            tensor.masked_fill_(triangle.mask, value)

    tensor_class.__setitem__ = write_triangle
    torch.triu_indices = _indices(upper, torch.triu)
    torch.tril_indices = _indices(lower, torch.tril)
    try:
        yield
    finally:
        tensor_class.__setitem__, torch.triu_indices, torch.tril_indices = write, upper, lower


def _indices(original: Callable[..., torch.Tensor], cut: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def indices(row: Any, col: Any, offset: int = 0, **others: Any) -> Any:
        if not any(isinstance(size, torch.SymInt) for size in (row, col)):
            return original(row, col, offset, **others)
        return _Triangle((row, col), offset, cut)

    return indices
