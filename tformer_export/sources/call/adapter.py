"""`Adapter`: a wrapper that calls any module with its inputs one by one and returns its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import Axis, Mask
from tformer_export.sources.call.loss import logits_of_loss
from tformer_export.sources.call.outputs import choose_output
from tformer_export.sources.call.own_caches import fresh_caches
from tformer_export.sources.call.signature import call_by_name
from tformer_export.sources.call.step_positions import PLAIN, StepPositions


class Adapter(nn.Module):
    """A module that calls `module` by the names of its parameters and returns its logits.

    names: the inputs of the adapter's forward, in their order. None for an input leaves it to the module's default.
    fixed_arguments: arguments that are always the same.
    derived: arguments that are built from lengths.
    keeps: name of an input → the name of its keep-mask, (batch, time) bool. An input without one holds no padding.
    layouts: name of an input → its batch and time axis in the module, where they are not 0 and 1; or its batch alone.
    step: the input whose layout the logits have.
    output: name or index of the logits; several for a single-pass model, which are returned as a tuple.
    flat_logits: whether the module returns logits (batch · time, vocabulary).
    heads: functions that are applied to the output in turn, such as a projection that forward leaves out.
    caches: the name of each tensor into which forward writes, and that each call gets again, → its batch axis.
    row_axes: the batch axis of each output of a single-pass model; none if it is the first of all.
    numbers: the inputs that the module takes as (batch,), a number for each row. The adapter takes (batch, 1).
    positions: how forward counts the positions of the step input.
    reads_loss: whether forward returns the loss of training, whose logits are taken.
    single_axes: axes of size 1 that the step input has in the module, and its logits too. The adapter's have none.
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        fixed_arguments: Mapping[str, Any] | None = None,
        derived: Mapping[str, Mask] | None = None,
        keeps: Mapping[str, str] | None = None,
        layouts: Mapping[str, tuple[int, ...]] | None = None,
        step: str | None = None,
        output: str | int | Sequence[str | int] | None = None,
        flat_logits: bool = False,
        heads: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (),
        caches: Mapping[str, int] | None = None,
        row_axes: Sequence[int] = (),
        numbers: Sequence[str] = (),
        positions: StepPositions = PLAIN,
        single_axes: Sequence[int] = (),
        reads_loss: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.flat_logits, self.heads, self.positions = module, flat_logits, tuple(heads), positions
        self.caches, self.row_axes, self.numbers = dict(caches or {}), tuple(row_axes), tuple(numbers)
        self.single_axes, self.reads_loss = tuple(single_axes), reads_loss
        self.names, self.fixed_arguments, self.derived = names, dict(fixed_arguments or {}), dict(derived or {})
        self.keeps, self.layouts, self.step, self.output = dict(keeps or {}), dict(layouts or {}), step, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        returned = self.call_module(*inputs)
        if self.output is not None and not isinstance(self.output, (str, int)):
            outputs = tuple(choose_output(returned, which) for which in self.output)
            return tuple(map(torch.movedim, outputs, self.row_axes, [0] * len(outputs))) if self.row_axes else outputs
        output = self.logits(returned)
        if self.row_axes:
            return output.movedim(self.row_axes[0], 0)
        if self.flat_logits and self.step is not None:
            batch, time = inputs[self.names.index(self.step)].shape[:2]
            first = (time, batch) if self.layouts.get(self.step) == (1, 0) else (batch, time)
            output = output.reshape(*first, output.shape[-1])
        if self.step is None:
            return output
        if output.dim() == inputs[self.names.index(self.step)].dim() + len(self.single_axes) + 1:
            output = output.squeeze(self.single_axes)
        output = output.movedim(self.layouts[self.step], (0, 1)) if self.step in self.layouts else output
        return self.positions.from_module(output, 1, inputs[self.names.index(self.step)].shape[1])

    def logits(self, returned: Any) -> torch.Tensor:
        """Return the logits of the module's results, from the heads if there are any."""
        assert self.output is None or isinstance(self.output, (str, int))
        output = choose_output(returned, self.output)
        for head in self.heads:
            output = head(output)
        return output

    def call_module(self, *inputs: torch.Tensor) -> Any:
        """Call the module and return all its results."""
        if not self.caches:
            return self._call(*inputs)
        with fresh_caches(self, self.caches, inputs[0].shape[0]):
            return self._call(*inputs)

    def _call(self, *inputs: torch.Tensor) -> Any:
        given = zip(self.names, inputs, strict=True)
        tensors: dict[str, Any] = {name: value for name, value in given if value is not None}
        keeps = {name: tensors.pop(keep) for name, keep in self.keeps.items()}
        if self.step is not None:
            tensors[self.step] = self.positions.to_module(tensors[self.step])
        lengths: dict[Axis, int] = {name: value.shape[1] for name, value in tensors.items() if value.dim() > 1}
        arguments = {**tensors, **self.fixed_arguments}
        for name, mask in self.derived.items():
            of = tensors[mask.of]
            keep = keeps[mask.of] if mask.of in keeps else torch.ones(of.shape[0], of.shape[1], dtype=torch.bool)
            arguments[name] = mask.build(keep, lengths, padded=mask.of in keeps)
        for name, axes in self.layouts.items():
            arguments[name] = arguments[name].movedim((0, 1)[: len(axes)], axes)
        for axis in self.single_axes:
            arguments[str(self.step)] = arguments[str(self.step)].unsqueeze(axis)
        for name in self.numbers:
            arguments[name] = arguments[name].squeeze(1)
        if self.reads_loss:
            return logits_of_loss(lambda: call_by_name(self.module, arguments))
        return call_by_name(self.module, arguments)
