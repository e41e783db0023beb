"""The axis of a value that holds the rows of a batch: an axis for the batch alone, or one merged with another axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression
from tformer_export.common.onnx_operators import merge_axes, split_axis

T = TypeVar("T")  # a tensor, or the node that stands for one


@dataclass(frozen=True)
class BatchAxis:
    """The rows are on `axis`, with `times` entries for each row.

    With `outer`, the entries of a row are neighbours (batch · heads). Otherwise the rows of an entry are (heads ·
    batch).
    """

    axis: int
    times: int = 1
    outer: bool = True

    @property
    def batch_axis(self) -> int:
        """Return the axis of the batch after the split."""
        return self.axis if self.times == 1 or self.outer else self.axis + 1

    def axis_after_split(self, axis: int) -> int:
        """Return the number of another axis after the split."""
        return axis + (self.times > 1 and axis > self.axis)

    def split(self, call: Callable[..., T], value: T) -> T:
        """Return the value with an axis for the batch alone.

        call: inserts a node for a function, or calls the function.
        """
        if self.times == 1:
            return value
        return call(split_axis, value, self.axis, *((-1, self.times) if self.outer else (self.times, -1)))

    def merge(self, call: Callable[..., T], value: T) -> T:
        """Return a value that `split` has split in its merged form."""
        return value if self.times == 1 else call(merge_axes, value, self.axis)

    def shape(self, shape: tuple[Any, ...], batch: Any) -> tuple[Any, ...]:
        """Return the shape of the value after the split, with `batch` for the size of the batch axis."""
        both = (batch,) if self.times == 1 else (batch, self.times) if self.outer else (self.times, batch)
        return (*shape[: self.axis], *both, *shape[self.axis + 1 :])


def times_batch(captured: CapturedGraph, size: Any) -> int | None:
    """Return k of a size that is k · batch, such as batch and heads merged; None for other sizes."""
    ratios = (expression(size) / batch for batch in captured.batch)
    return next((int(ratio) for ratio in ratios if ratio.is_Integer), None)


def find_rows(
    captured: CapturedGraph, shape: Sequence[Any], value: torch.Tensor, other: torch.Tensor
) -> BatchAxis | None:
    """Return the axis of the rows of a value; None if it is ambiguous.

    shape: its traced sizes.
    value, other: the value for two rows of inputs, and for the same first row with another second row.
    """
    sizes = {axis: k for axis, size in enumerate(shape) if (k := times_batch(captured, size)) is not None}
    if len(sizes) != 1:
        unmerged = [axis for axis, k in sizes.items() if k == 1]
        return BatchAxis(unmerged[0]) if len(unmerged) == 1 else None
    ((axis, times),) = sizes.items()
    if times == 1:
        return BatchAxis(axis)
    is_same = (value == other) | ((value != value) & (other != other))
    is_changed = (~is_same).movedim(axis, 0).flatten(1).any(1)
    outer, inner = is_changed.reshape(2, times), is_changed.reshape(times, 2)
    fits = [not outer[0].any(), not inner[:, 0].any()]
    return BatchAxis(axis, times, outer=fits[0]) if sum(fits) == 1 else None
