"""Lists of indices that Python does not read: `rows = rows.tolist(); x[rows]`. Their tensor indexes in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class IndexList:
    """What `tensor.tolist()` returns for whole numbers along one axis: a list that is read when Python needs it.

    tensor: its numbers, of which nothing else has the storage.
    """

    def __init__(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], list[Any]]) -> None:
        _patch_indexing()
        self.tensor, self._read = tensor, read
        self._found: list[Any] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(numbers, list)
        return list

    @property
    def numbers(self) -> list[Any]:
        if self._found is None:
            self._found = self._read(self.tensor)
        return self._found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch asks for protocols such as __torch_function__
            raise AttributeError(name)
        return getattr(self.numbers, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.numbers[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.numbers[index] = value

    def __contains__(self, value: Any) -> bool:
        return value in self.numbers

    def __eq__(self, other: Any) -> bool:
        return bool(self.numbers == other)

    def __add__(self, other: Any) -> list[Any]:
        return [*self.numbers, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self.numbers]

    def __mul__(self, times: int) -> list[Any]:
        return self.numbers * times

    def __repr__(self) -> str:
        return repr(self.numbers)

    def as_tensor(self) -> torch.Tensor | list[Any]:
        """Return the tensor, or the list if Python has read it, and may have changed it."""
        return self.tensor if self._found is None else self._found


@contextmanager
def lists_index_as_tensors() -> Iterator[None]:
    """Patch indexing of tensors from the first `IndexList` on: torch reads a list before a function mode gets the call.

    Only then, because torch takes tensors for sequences while indexing is a function of Python. Such a sequence has no
    length if it has no axes, so `torch.tensor([number])` fails for a tensor.

    The patch is process-wide: the caller holds TORCH_PATCH_LOCK.
    """
    before = {name: vars(torch.Tensor).get(name) for name in ("__getitem__", "__setitem__")}
    try:
        yield
    finally:
        for name, method in before.items():
            if method is not None:
                setattr(torch.Tensor, name, method)
            elif name in vars(torch.Tensor):
                delattr(torch.Tensor, name)


def _patch_indexing() -> None:
    tensor_class: Any = torch.Tensor
    get, put = tensor_class.__getitem__, tensor_class.__setitem__
    if getattr(get, "takes_index_lists", False):
        return

    def read(tensor: torch.Tensor, index: Any) -> Any:
        return get(tensor, _with_tensors(index))

    read.takes_index_lists = True  # type: ignore[attr-defined]
    tensor_class.__getitem__ = read
    tensor_class.__setitem__ = lambda tensor, index, value: put(tensor, _with_tensors(index), value)


def _with_tensors(index: Any) -> Any:
    if type(index) is IndexList:
        return index.as_tensor()
    return tuple(map(_with_tensors, index)) if type(index) is tuple else index
