"""Loops over positions that carry states of fixed size: recurrent layers, linear attention, state-space models.

A loop over positions (`capture/scan.py`) runs its body on the states after the position before. A step runs it for the
new positions alone, from the states after the last position. The states are carries, caches without a time axis. So a
step costs the same at any length.

The initial states are those of the model: zeros, weights, or values of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from tformer_export.analysis.batch_axes import BatchAxis, find_rows
from tformer_export.analysis.binding_time import Level
from tformer_export.capture.scan import Scan
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import is_read_from_data, meta

MAX_ROUNDING = 1e-4  # of the range of the values


class Graph(Protocol):
    """The part of `restriction.RestrictionSolver` that is needed."""

    captured: CapturedGraph
    level: Mapping[Node, Level]
    values: dict[Node, Any]
    others: dict[Node, Any]

    def time_axes(self, node: Node) -> list[int]: ...

    def is_exact(self, node: Node, axis: int) -> bool: ...

    def is_timed_size(self, leaf: Any) -> bool: ...


@dataclass(frozen=True)
class CarriedState:
    """A state of a loop.

    initial: its value before the first position; None for zeros.
    rows: the axis of the batch.
    shape: its traced sizes.
    result: the number of its last value among the results of the operation.
    """

    initial: Node | None
    rows: BatchAxis
    shape: tuple[Any, ...]
    dtype: torch.dtype
    result: int


@dataclass(frozen=True)
class Recurrence:
    """The states of a loop over positions, in the order of its operands."""

    states: tuple[CarriedState, ...]


def find_recurrence(graph: Graph, node: Node) -> Recurrence | None:
    """Return the states by which a loop is decoded step by step; None for other operations and other loops.

    All that a position reads has to be its own rows, the states, and values that are the same at every position.
    """
    scan = node.target
    if not isinstance(scan, Scan) or graph.level[node] != Level.STEP:
        return None
    initial, sequences, others = scan.split(node.args)
    if not all(graph.time_axes(x) == [0] and graph.is_exact(x, 0) for x in sequences):
        return None
    if any(graph.level[x] == Level.REQUEST for x in sequences) or not all(
        _is_steady(graph, x) for x in initial + others
    ):
        return None
    states = tuple(_state(graph, node, initial[i], i) for i in range(scan.num_states))
    if None in states or not _continues(graph, node):
        return None
    return Recurrence(states)  # type: ignore[arg-type]


def _is_steady(graph: Graph, operand: Any) -> bool:
    """Return whether an operand is the same at every position and every length."""
    if not isinstance(operand, Node):
        return True
    if graph.level[operand] == Level.STEP or is_read_from_data(operand) or graph.is_timed_size(operand):
        return False
    return not graph.time_axes(operand)


def _state(graph: Graph, node: Node, initial: Node, number: int) -> CarriedState | None:
    result = len(meta(node)) - node.target.num_states + number  # type: ignore[union-attr]
    traced = meta(node)[result]
    rows = find_rows(graph.captured, traced.shape, graph.values[node][result], graph.others[node][result])
    if rows is None:
        return None
    is_zero = graph.level[initial] == Level.CONSTANT and not graph.values[initial].any()
    return CarriedState(None if is_zero else initial, rows, tuple(traced.shape), traced.dtype, result)


def _continues(graph: Graph, node: Node) -> bool:
    """Return whether the loop over later positions, from the states after earlier ones, gives the rows of the whole."""
    scan = node.target
    assert isinstance(scan, Scan)
    initial, sequences, others = ([_value(graph, x) for x in part] for part in scan.split(node.args))
    whole, length = graph.values[node], sequences[0].shape[0]
    with torch.no_grad():
        for middle in range(1, length):
            before = scan(*initial, *(x[:middle] for x in sequences), *others)
            after = scan(*before[-scan.num_states :], *(x[middle:] for x in sequences), *others)
            for i, expected in enumerate(whole[: -scan.num_states]):
                scale = float(expected.abs().max())
                if not torch.allclose(after[i], expected[middle:], MAX_ROUNDING, MAX_ROUNDING * scale, equal_nan=True):
                    return False
    return True


def _value(graph: Graph, operand: Any) -> Any:
    return graph.values[operand] if isinstance(operand, Node) else operand
