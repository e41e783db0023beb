"""A module whose forward takes one row without a batch axis: it is mapped over the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tformer_export.common.derived_inputs import BATCH, Mask
from tformer_export.sources.call.outputs import all_outputs
from tformer_export.sources.call.selected_ids import AllIdsSelected
from tformer_export.sources.call.signature import call_by_name, parameters_of

_IDS = (torch.int64, torch.int32)


class OverRows(nn.Module):
    """A module with a batch axis, of a module for one row (`torch.vmap`).

    mapped: name of an argument → its batch axis. The other arguments are the same for all rows.
    """

    def __init__(self, module: nn.Module, mapped: Mapping[str, int]) -> None:
        super().__init__()
        self.module, self.mapped = module, dict(mapped)
        self.parameters_by_name = parameters_of(module)

    def forward(self, **arguments: Any) -> Any:
        rows = {name: arguments.pop(name) for name in self.mapped if name in arguments}

        def run(rows: dict[str, torch.Tensor]) -> dict[str | int, torch.Tensor]:
            return all_outputs(call_by_name(self.module, {**arguments, **rows}))

        outputs = torch.vmap(run, in_dims=({name: self.mapped[name] for name in rows},))(rows)
        return outputs[0] if list(outputs) == [0] else outputs


class RowByRow(nn.Module):
    """A module that runs another for each row alone, as a batch of one row (`torch.vmap`). Inputs have the batch first.

    It computes the same if no row depends on the others. So code that loops over the rows has one row. Writes into a
    tensor of this code's own, which has no axis of the batch, become new tensors that have one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False

    def forward(self, *inputs: torch.Tensor) -> Any:
        def run(*rows: torch.Tensor) -> Any:
            batch = [row.unsqueeze(0) for row in rows]
            with AllIdsSelected(batch):
                outputs = self.module(*batch)
            return tuple(out.squeeze(0) for out in outputs) if isinstance(outputs, tuple) else outputs.squeeze(0)

        with _mapped_as_one_operation():
            return torch.vmap(torch.func.functionalize(run))(*inputs)


@contextmanager
def _mapped_as_one_operation() -> Iterator[None]:
    """Let `torch.vmap` map copies and attention as operations on all rows. By itself it loops over the rows."""

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return source.to(self.dtype).expand(self.shape).clone()

    with torch.library._scoped_library("aten", "IMPL") as library, sdpa_kernel(SDPBackend.MATH):
        library.impl("copy", copy, "FuncTorchBatched")
        yield


def batch_axes_of(example: Mapping[str, torch.Tensor], masks: Mapping[str, Mask]) -> dict[str, int]:
    """Return the batch axis of each input and mask that has one."""
    return dict.fromkeys(example, 0) | {n: m.shape.index(BATCH) for n, m in masks.items() if BATCH in m.shape}


def takes_one_row(example: Mapping[str, Any], step_input: str | None, axes: Mapping[str, Sequence[int | None]]) -> bool:
    """Return whether forward takes one row without a batch axis.

    So it is if the caller names no batch axis, or if the ids of the step input, or of all inputs, have one axis.
    """
    if axes and all(len(own) in (1, 2) and own[0] is None for own in axes.values()):
        return True
    ids = [example[step_input]] if step_input is not None and step_input in example else [*example.values()]
    return bool(ids) and all(isinstance(v, torch.Tensor) and v.dim() == 1 and v.dtype in _IDS for v in ids)


def batched_axes(value: torch.Tensor, axes: Sequence[int | None] | None) -> tuple[int, ...]:
    """Return the axes of batch and time that a value gets with a batch axis in front.

    axes: those without a batch axis, (None, time) or (None,); by default time is the first axis.
    """
    time = (0,) if axes is None else tuple(axis for axis in axes if axis is not None)
    return 0, *(axis + 1 for axis in time)
