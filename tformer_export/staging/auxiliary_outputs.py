"""Extra outputs, such as attention weights and hidden states: their stage and their layout.

A value of the step becomes an output of decode, (batch, selected, …), like the logits. A value of the request becomes
an output of encode, (batch, …). The runtime crops axes that are as long as an input to each row's own length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.common.source_lines import size_words
from tformer_export.staging.emitter import axis_names
from tformer_export.staging.output_lengths import find_derived_lengths
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format import manifest


@dataclass(frozen=True)
class AuxiliaryOutput:
    """An extra output.

    axes: the batch axis of the value, then its time axis if it is of the step; they become the first axes.
    shape: the shape in the file, in that layout.
    """

    name: str
    node: Node
    axes: tuple[int, ...]
    shape: tuple[int | str, ...]

    @property
    def module(self) -> str | None:
        """Return the submodule whose output it is; None unless it holds hidden states."""
        module_name = self.name.removeprefix(f"{manifest.HIDDEN_STATES}.")
        return module_name if module_name != self.name else None

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return the source model's value in the layout of the file."""
        return value.movedim(self.axes, tuple(range(len(self.axes))))


def find_auxiliary_outputs(
    captured: CapturedGraph, level: Mapping[Node, Level]
) -> tuple[list[AuxiliaryOutput], list[AuxiliaryOutput]]:
    """Return the extra outputs of encode and of decode.

    Raises OptionError for a value that has no row for each request.
    """
    outputs: tuple[list[AuxiliaryOutput], list[AuxiliaryOutput]] = ([], [])
    for name, node in captured.extras.items():
        if level[node] == Level.CONSTANT:
            raise OptionError(f"the extra output {name} is the same for every input: leave it out")
        of_step = level[node] == Level.STEP
        outputs[of_step].append(_extra(captured, name, node, of_step))
    return outputs


def _extra(captured: CapturedGraph, name: str, node: Node, of_step: bool) -> AuxiliaryOutput:
    """Return an extra output; raise OptionError if its rows or positions are not on axes of their own."""
    sizes = [expression(size) for size in meta(node).shape]
    batch = [axis for axis, size in enumerate(sizes) if size in captured.batch]
    time = [axis for axis, size in enumerate(sizes) if captured.time in size.free_symbols] if captured.time else []
    has_simple_axes = len(batch) == 1 and len(time) == of_step and all(sizes[axis] == captured.time for axis in time)
    axes = (*batch, *time)
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    names = axis_names(captured, meta(node))
    derived_lengths = find_derived_lengths(captured, [meta(node)])
    if not has_simple_axes or not all(
        sizes[axis].is_Integer or sizes[axis].is_Symbol or names[axis] in derived_lengths for axis in rest
    ):
        shape = f"({', '.join(size_words(size, captured.size_names) for size in sizes)})"
        positions = "its positions" if of_step else "none for those of the step"
        raise OptionError(
            f"{name} has the shape {shape}, but an extra output needs one axis for the batch, "
            f"{positions}, and other axes that are fixed, the length of an input or the length after a convolution"
        )
    first = (manifest.BATCH_AXIS, manifest.SELECTED_AXIS) if of_step else (manifest.BATCH_AXIS,)
    return AuxiliaryOutput(name, node, axes, (*first, *(names[axis] for axis in rest)))
