"""Sizes that a model stores in a tensor and reads again, such as `torch.tensor(min(x.shape[1], 512))`.

A trace does not know the number that is read from a tensor, so a slice to that number would have an unknown size. A
number that is computed from sizes and constants alone is known. It is tracked here next to its tensor, and replaces the
number that would be read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK

_MAKERS = (torch.tensor, torch.scalar_tensor, torch.as_tensor)
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "radd": operator.add,
    "sub": operator.sub,
    "rsub": lambda one, other: other - one,
    "mul": operator.mul,
    "rmul": operator.mul,
}
_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    getattr(holder, spelled): compute
    for name, compute in _OPERATIONS.items()
    for holder in (torch, torch.Tensor)
    for spelled in (name, f"__{name}__")
    if hasattr(holder, spelled)
}
_TAKES_NUMBERS = (torch.clamp, torch.Tensor.clamp)  # a tensor without axes may stand for a bound


class SizeFollowingMode(TorchFunctionMode):
    """A mode that records the tensors that hold a size, and keeps them alive until it ends.

    torch's function modes belong to the thread that enters them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.item and self._knows(args[0]):
            return self._size(args[0])
        if func is torch.Tensor.__getitem__:
            args = (args[0], self._index(args[1]))
        elif func in _TAKES_NUMBERS:
            args = (args[0], *map(self._size, args[1:]))
            kwargs = {name: self._size(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func in _MAKERS and args and isinstance(args[0], torch.SymInt):
            self._sizes[id(result)] = (result, args[0])
        elif func in _ARITHMETIC and len(args) == 2 and not kwargs and any(map(self._knows, args)):
            sizes = [self._size(value) for value in args]
            if all(isinstance(size, (int, torch.SymInt)) for size in sizes) and isinstance(result, torch.Tensor):
                self._sizes[id(result)] = (result, _ARITHMETIC[func](*sizes))
        return result

    def _knows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in self._sizes

    def _size(self, value: Any) -> Any:
        """Return the size that a tensor holds; any other value unchanged."""
        return self._sizes[id(value)][1] if self._knows(value) else value

    def _index(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, slice):
            return slice(*map(self._size, (index.start, index.stop, index.step)))
        return index


@contextmanager
def follow_sizes(module: torch.nn.Module) -> Iterator[None]:
    """Follow sizes in calls of `module` for a while, by a patch of its forward. Captures of other threads wait."""
    with TORCH_PATCH_LOCK:
        forward = module.forward

        @functools.wraps(forward)
        def forward_in_mode(*args: Any, **kwargs: Any) -> Any:
            with SizeFollowingMode():  # entered last, it gets a call before the modes of the trace
                return forward(*args, **kwargs)

        module.forward = forward_in_mode
        try:
            yield
        finally:
            del module.forward  # the method of the class is visible again
