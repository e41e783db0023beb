"""Where a value holds the rows of a batch: on an axis of their own, or merged with another axis, such as the heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node

from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.common.onnx_operators import merged, parted

T = TypeVar("T")  # a tensor, or the node that stands for one


@dataclass(frozen=True)
class Rows:
    """The rows are on `axis`, `times` entries for each; with `outer`, a row's entries lie together (batch · heads),
    else those of all rows do (heads · batch)."""

    axis: int
    times: int = 1
    outer: bool = True

    @property
    def own_axis(self) -> int:
        """The batch's axis once the two are apart."""
        return self.axis if self.times == 1 or self.outer else self.axis + 1

    def apart(self, axis: int) -> int:
        """Where another axis is once the two are apart."""
        return axis + (self.times > 1 and axis > self.axis)

    def split(self, call: Callable[..., T], value: T) -> T:
        """The value with an axis for the batch alone. `call` makes a node of a function, or calls it."""
        if self.times == 1:
            return value
        return call(parted, value, self.axis, *((-1, self.times) if self.outer else (self.times, -1)))

    def merge(self, call: Callable[..., T], value: T) -> T:
        """What `split` took apart."""
        return value if self.times == 1 else call(merged, value, self.axis)

    def shape(self, shape: tuple[Any, ...], batch: Any) -> tuple[Any, ...]:
        """The shape of the value split, with `batch` for the size of its axis."""
        both = (batch,) if self.times == 1 else (batch, self.times) if self.outer else (self.times, batch)
        return (*shape[: self.axis], *both, *shape[self.axis + 1 :])


def times_batch(captured: Captured, size: Any) -> int | None:
    """k of a size that is k · batch, such as batch and heads merged."""
    ratios = (expression(size) / batch for batch in captured.batch)
    return next((int(ratio) for ratio in ratios if ratio.is_Integer), None)


def find_rows(captured: Captured, node: Node, value: torch.Tensor, other: torch.Tensor) -> Rows | None:
    """Where the rows are; None if that cannot be told.

    value, other: the node's value for two rows of inputs, and for the same first row beside another second one.
    """
    sizes = {axis: k for axis, size in enumerate(meta(node).shape) if (k := times_batch(captured, size)) is not None}
    if len(sizes) != 1:
        own = [axis for axis, k in sizes.items() if k == 1]
        return Rows(own[0]) if len(own) == 1 else None
    ((axis, times),) = sizes.items()
    if times == 1:
        return Rows(axis)
    same = (value == other) | ((value != value) & (other != other))
    changed = (~same).movedim(axis, 0).flatten(1).any(1)
    outer, inner = changed.reshape(2, times), changed.reshape(times, 2)
    fits = [not outer[0].any(), not inner[:, 0].any()]
    return Rows(axis, times, outer=fits[0]) if sum(fits) == 1 else None
