"""What a graph gives beside its output: at which stage, and in which layout.

A value of the step becomes an output of decode, (batch, wanted, …), like the logits. A value of the request becomes an
output of encode, (batch, …). The runtime cuts the axes that are as long as an input to each row's own length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.staging.emitter import axis_names
from tformer_export.staging.output_lengths import followers
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format import manifest


@dataclass(frozen=True)
class Extra:
    """axes: the batch axis of the value, and its time axis if it is of the step; they become the first ones.

    shape: in that layout, as in the file.
    """

    name: str
    node: Node
    axes: tuple[int, ...]
    shape: tuple[int | str, ...]

    @property
    def module(self) -> str | None:
        """The submodule whose output it is, if it is hidden states."""
        of = self.name.removeprefix(f"{manifest.HIDDEN}.")
        return of if of != self.name else None

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """The source model's value in that layout."""
        return value.movedim(self.axes, tuple(range(len(self.axes))))


def find_extras(captured: Captured, level: Mapping[Node, Level]) -> tuple[list[Extra], list[Extra]]:
    """(of encode, of decode). OptionError for a value that cannot be given row by row."""
    found: tuple[list[Extra], list[Extra]] = ([], [])
    for name, node in captured.extras.items():
        if level[node] == Level.CONSTANT:
            raise OptionError(f"{name} is the same for every input: there is nothing to give")
        of_step = level[node] == Level.STEP
        found[of_step].append(_extra(captured, name, node, of_step))
    return found


def _extra(captured: Captured, name: str, node: Node, of_step: bool) -> Extra:
    sizes = [expression(size) for size in meta(node).shape]
    batch = [axis for axis, size in enumerate(sizes) if size in captured.batch]
    time = [axis for axis, size in enumerate(sizes) if captured.time in size.free_symbols] if captured.time else []
    plain = len(batch) == 1 and len(time) == of_step and all(sizes[axis] == captured.time for axis in time)
    axes = (*batch, *time)
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    names = axis_names(captured, meta(node))
    told = followers(captured, [meta(node)])
    if not plain or not all(sizes[axis].is_Integer or sizes[axis].is_Symbol or names[axis] in told for axis in rest):
        positions = "its positions" if of_step else "none for those of the step"
        raise OptionError(
            f"{name} has the shape {tuple(map(str, sizes))}; to be given row by row it needs one axis for the batch, "
            f"{positions}, and else sizes that are fixed, an input's length or what convolutions make of it"
        )
    first = (manifest.BATCH, manifest.WANTED) if of_step else (manifest.BATCH,)
    return Extra(name, node, axes, (*first, *(names[axis] for axis in rest)))
