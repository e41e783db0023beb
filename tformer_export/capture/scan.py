"""A loop over positions as one operation: values of fixed size are carried from position to position."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_numbers = itertools.count()


class Scan:
    """The operation of a graph's node that runs a body for each position.

    Its operands, in this order: the initial states; sequences, whose first axis is time; other values, which are the
    same for all positions. The body takes the states, one row of each sequence and the other values, and returns the
    new states and its results. The operation returns a list: the results of all positions, with time first, and then
    the last states.

    torch.export traces it as `torch.ops.higher_order.scan`, and torch.onnx writes that as the operator Scan. A loop
    without states is traced as operations on all positions at once. Cost otherwise: one run of the body in Python for
    each position.
    """

    def __init__(self, body: Callable[..., Sequence[Any]], num_states: int, num_sequences: int) -> None:
        self.body, self.num_states, self.num_sequences = body, num_states, num_sequences
        self.__name__ = self.__qualname__ = f"scan_{next(_numbers)}"  # torch.fx writes the name into its code

    def __repr__(self) -> str:
        return "a loop over positions"

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the initial states, the sequences and the other values."""
        end = self.num_states + self.num_sequences
        return [*operands[: self.num_states]], [*operands[self.num_states : end]], [*operands[end:]]

    def __call__(self, *operands: Any) -> list[Any]:
        states, sequences, others = self.split(operands)
        if not states:
            axes = tuple(0 for _ in sequences), tuple(None for _ in others)
            return list(torch.vmap(lambda xs, ys: tuple(self.body(*xs, *ys)), axes)(tuple(sequences), tuple(others)))
        if get_proxy_mode() is not None or any(isinstance(o, FakeTensor) for o in operands):
            states = [state.clone(memory_format=torch.contiguous_format) for state in states]  # with strides of its own
            sequences = [sequence.contiguous() for sequence in sequences]
            others = _without_shared_storages(others)
            found = scan_op(self._run_without_aliases, states, sequences, tuple(others))
            return [*found[self.num_states :], *found[: self.num_states]]
        length = sequences[0].shape[0]
        results: list[list[torch.Tensor]] = []
        for i in range(length):
            states, rows = self._step(states, [sequence[i] for sequence in sequences], others)
            results.append(rows)
        if not length:
            _, rows = self._step(states, [sequence.new_zeros(sequence.shape[1:]) for sequence in sequences], others)
            return [*(row.new_empty((0, *row.shape)) for row in rows), *states]
        return [*(torch.stack(rows) for rows in zip(*results, strict=True)), *states]

    def _step(self, states: list[Any], rows: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        found = self.body(*states, *rows, *others)
        return [*found[: self.num_states]], [*found[self.num_states :]]

    def _run_without_aliases(self, *operands: Any) -> list[Any]:
        return [value.clone(memory_format=torch.contiguous_format) for value in self.body(*operands)]

    def guarded(self, axes: Sequence[tuple[int, int, bool]]) -> Scan:
        """Return the operation with one more sequence, (time, batch) booleans. Where one is false, states stay.

        axes: of each state, the axis of the rows of the batch, the number of its entries for each row, and whether
            those of one row are neighbours.
        """
        end = self.num_states + self.num_sequences

        def body(*operands: Any) -> list[Any]:
            states, is_valid = operands[: self.num_states], operands[end]
            found = self.body(*operands[:end], *operands[end + 1 :])
            kept = []
            for old, new, (axis, times, is_outer) in zip(states, found, axes, strict=False):
                valid = is_valid
                if times > 1:
                    valid = (valid[:, None].expand(-1, times) if is_outer else valid.expand(times, -1)).flatten()
                shape = [1] * new.dim()
                shape[axis] = -1
                kept.append(torch.where(valid.reshape(shape), new, old))
            return [*kept, *found[self.num_states :]]

        return Scan(body, self.num_states, self.num_sequences + 1)


def _without_shared_storages(values: Sequence[Any]) -> list[Any]:
    """Copy the tensors that show a storage that another one shows too: torch refuses them."""
    seen: set[int] = set()
    result = []
    for value in values:
        storage = value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
        result.append(value.clone() if storage in seen else value)
        seen |= {storage} if storage is not None else set()
    return result
