"""A module that runs at one length for sequences of any length.

Some code does other operations at other lengths: a scan by doubling takes log₂ of the length in rounds, a transform has
the next fast size. No program of such operations holds for all lengths. But if no result depends on later positions,
the module can always run at the greatest length. The sequence is filled up at its end, and the results of the filling
are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tformer_export.common.module_state import WriteUndo, unchanged

TRIED_LENGTHS = 5, 6  # at which the outputs show their time axes
MAX_OPERATIONS = 3000  # a loop over positions that is written out has many thousands, and takes minutes to trace


class AtOneLength(nn.Module):
    """Runs a module at one length.

    number: the place of the sequence among the inputs; its axes are (batch, time, …).
    time_axes: of each output.
    """

    def __init__(self, module: nn.Module, number: int, length: int, time_axes: list[int]) -> None:
        super().__init__()
        self.module, self.number, self.length, self.time_axes = module, number, length, time_axes
        self.training = False

    def forward(self, *inputs: torch.Tensor) -> Any:
        filled = [*inputs]
        sequence = filled[self.number]
        time = sequence.shape[1]
        behind = [0] * (2 * (sequence.dim() - 2))
        filled[self.number] = nn.functional.pad(sequence, [*behind, 0, self.length - time])
        leaves, spec = pytree.tree_flatten(self.module(*filled))
        kept = [leaf.narrow(axis, 0, time) for leaf, axis in zip(leaves, self.time_axes, strict=True)]
        return pytree.tree_unflatten(kept, spec)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations within a `with` block."""

    operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def at_one_length(
    module: nn.Module, example: Mapping[str, torch.Tensor], step_input: str, length: int
) -> AtOneLength | None:
    """Return a module that runs at `length`.

    Return None if it fails there, if it runs too many operations, or if an output has not one row a position.
    """
    shapes = []
    for tried in (*TRIED_LENGTHS, length):
        inputs = {name: value[:1] for name, value in example.items()}
        step = inputs[step_input]
        inputs[step_input] = step.index_select(1, torch.arange(tried) % step.shape[1])
        try:
            with torch.no_grad(), unchanged(module), WriteUndo(module, []), _Count() as count:  # type: ignore[no-untyped-call]
                leaves = pytree.tree_leaves(module(*inputs.values()))
        except Exception:  # forward is the user's code
            return None
        if count.operations > MAX_OPERATIONS or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        shapes.append([leaf.shape for leaf in leaves])
    time_axes = []
    for first, second, last in zip(*shapes, strict=True):
        axes = [axis for axis, size in enumerate(first) if size != second[axis]]
        if len(axes) != 1 or (first[axes[0]], second[axes[0]], last[axes[0]]) != (*TRIED_LENGTHS, length):
            return None
        time_axes.append(axes[0])
    return AtOneLength(module, list(example).index(step_input), length, time_axes)
