"""Sizes that a model puts into a tensor and takes out again, such as `torch.tensor(min(x.shape[1], 512))`.

A trace does not know what number is taken out of a tensor, so that whatever is cut or made by it would have an unknown
size. But what has been computed of sizes and numbers alone is known: it is followed here, beside the tensors, and given
in the place of what would be taken out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
_TAKES_NUMBERS = (torch.clamp, torch.Tensor.clamp)  # of its bounds, a tensor without axes is taken for a number


class SizesFollowed(TorchFunctionMode):
    """While it is entered, tensors that hold a size are known for it. It holds them for that long."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[torch.Tensor, Any]] = {}

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
            self._held[id(result)] = (result, args[0])
        elif func in _ARITHMETIC and len(args) == 2 and not kwargs and any(map(self._knows, args)):
            sizes = [self._size(value) for value in args]
            if all(isinstance(size, (int, torch.SymInt)) for size in sizes) and isinstance(result, torch.Tensor):
                self._held[id(result)] = (result, _ARITHMETIC[func](*sizes))
        return result

    def _knows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in self._held

    def _size(self, value: Any) -> Any:
        """The size that a tensor holds; any other value as it is."""
        return self._held[id(value)][1] if self._knows(value) else value

    def _index(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, slice):
            return slice(*map(self._size, (index.start, index.stop, index.step)))
        return index


@contextmanager
def sizes_followed(module: torch.nn.Module) -> Iterator[None]:
    """For a while, sizes are followed wherever `module` is called."""
    forward = module.forward

    @functools.wraps(forward)
    def followed(*inputs: Any, **named: Any) -> Any:
        with SizesFollowed():  # entered last, it sees a call before the trace's own modes
            return forward(*inputs, **named)

    module.forward = followed
    try:
        yield
    finally:
        del module.forward  # what stands in the class is seen again
