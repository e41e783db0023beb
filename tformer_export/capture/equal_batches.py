"""The batch of several inputs as one size.

Each input of a trace has a size of its own for the rows of its batch. Most code makes them equal: it adds values of two
inputs. Code that reshapes values of one input by the rows of another leaves sizes such as 8 · rows // other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph

from tformer_export.common.fx_nodes import expression, meta


def mixes_batches(graph: Graph, batches: Sequence[Any]) -> bool:
    """Return whether a size in a graph depends on the batches of two inputs.

    batches: the traced sizes of the batches.
    """
    symbols = {expression(size) for size in batches if isinstance(size, torch.SymInt)}
    if len(symbols) < 2:
        return False
    values = (meta(node) for node in graph.nodes)
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return any(isinstance(s, torch.SymInt) and len(expression(s).free_symbols & symbols) > 1 for s in sizes)


@contextmanager
def batches_are_equal(module: torch.nn.Module, inputs: Sequence[int]) -> Iterator[None]:
    """Let calls of a module say that these inputs, by their numbers, have one number of rows."""

    def check(called: torch.nn.Module, values: tuple[torch.Tensor, ...]) -> None:
        for number in inputs[1:]:
            torch._check(values[number].shape[0] == values[inputs[0]].shape[0])  # type: ignore[no-untyped-call]

    handle = module.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
