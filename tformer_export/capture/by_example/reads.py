"""Numbers that Python reads out of tensors while forward runs: `if pad.any()`, `int(counts[e])`, `ids.tolist()`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tformer_export.capture.by_example.slices import take_slices
from tformer_export.capture.by_example.tracked_numbers import (
    Asked,
    TrackedFloat,
    TrackedInt,
    numbers_at_hand,
    plain,
    track,
)
from tformer_export.common.source_lines import find_users_place

_SCALARS: dict[Any, type | None] = {
    torch.Tensor.item: None,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.__index__: int,
}
_COMPARISONS = {torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.is_nonzero}
_ARRAYS: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__}
_OTHER_READS: set[Any] = {
    *_ARRAYS, torch.Tensor.__contains__, torch.Tensor.is_nonzero, torch.Tensor.nonzero,
    torch.Tensor.__format__, torch.Tensor.__repr__,
    torch.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.masked_select, torch.Tensor.masked_select,
    torch.unique, torch.Tensor.unique, torch.bincount, torch.Tensor.bincount,
}  # fmt: skip
_MAYBE_BY_MASK: set[Any] = {torch.Tensor.__getitem__, torch.where}


class ReadMode(TorchFunctionMode):
    """Notes the recorded operation of each read, and gives Python another number where that is asked for.

    forced: number of a read → the value that Python gets.
    reads: the names of the recorded operations, one for each read.
    asked: for each read, what Python compares the number with.
    at_hand: for each read, whole numbers of the user's code that reads, with which it may compare as well.
    arrays: the names of the recorded operations that stand for reads of whole arrays.
    at_hand_of_others: those of code that reads whole arrays, or sizes that follow from data.
    """

    def __init__(self, forced: Mapping[int, Any]) -> None:
        super().__init__()
        self.forced = forced
        self.reads: list[str] = []
        self.asked: list[Asked] = []
        self.at_hand: list[set[int]] = []
        self.arrays: list[str] = []
        self.at_hand_of_others: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only((TrackedInt, TrackedFloat), plain, (args, kwargs or {}))
        if isinstance(kwargs.get("generator"), torch.Generator):  # numbers of a seed of the module's own: constants
            with disable_proxy_modes_tracing():
                return func(*args, **kwargs)
        if func in _SCALARS:
            return self._read(func(*args), _SCALARS[func])
        if func is torch.Tensor.tolist:
            return self._list(args[0])
        if func in _COMPARISONS:
            return self._read(func(*args, **kwargs), bool)
        if func is torch.Tensor.__getitem__:
            return func(*take_slices(*args))
        if func in _OTHER_READS:
            self.at_hand_of_others |= numbers_at_hand(sys._getframe(1))
        if func in _ARRAYS and args[0].numel():
            args[0].detach().flatten()[0].item()
            self.arrays.append(_latest_name())
        return func(*args, **kwargs)

    def _read(self, value: Any, kind: type | None) -> Any:
        self.reads.append(_latest_name())
        self.asked.append(Asked())
        self.at_hand.append(numbers_at_hand(sys._getframe(1)))
        value = self.forced.get(len(self.reads) - 1, value)
        return track(value if kind is None else kind(value), self.asked[-1])

    def _list(self, tensor: torch.Tensor) -> Any:
        if tensor.dim() == 0:
            return self._read(tensor.item(), None)
        return [self._list(part) for part in tensor.unbind(0)]


class NoteReads(TorchFunctionMode):
    """Notes where Python reads numbers or sizes out of tensors, in a run that is not recorded.

    places: the user's line of each read. reads_more: whether one of them is not a read of single numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.reads_more = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SCALARS or func in _COMPARISONS or func is torch.Tensor.tolist:
            count = args[0].numel() if func is torch.Tensor.tolist else 1
        elif func in _OTHER_READS or (func in _MAYBE_BY_MASK and _is_by_mask(func, args)):
            count, self.reads_more = 1, True
        else:
            count = 0
        if count:
            self.places += [find_users_place([*traceback.walk_stack(sys._getframe(1))][::-1])] * count
        return func(*args, **(kwargs or {}))


def _is_by_mask(func: Any, args: Any) -> bool:
    """Return whether an index holds a mask, or `where` has its condition alone."""
    if func is torch.where:
        return len(args) == 1
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(key, torch.Tensor) and key.dtype in (torch.bool, torch.uint8) for key in keys)


def _latest_name() -> str:
    mode: Any = get_proxy_mode()
    name: str = next(reversed(mode.tracer.graph.nodes)).name
    return name


def other_values(value: Any) -> list[Any]:
    """Return values that may take Python another way than this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({0, 1, value + 1, 2 * value + 1, 1000} - {value})
    return [0.0, -value, value / 2, 2 * value + 1, 1e6]
