"""The binding time of every value: constant, known for a request, or known for a step.

A size does not inherit the binding time of the tensor from which it is read, unless it was counted from data. A value
that follows from the step input only through "is this padding?" is a constant: rows are right-padded, so valid
positions hold no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.fx import Node

from tformer_export.capture.trace import ID_MOVES, IDS, CapturedGraph, count_ids
from tformer_export.common.fx_nodes import is_read_from_data, meta
from tformer_runtime.format.manifest import ADAPTER_INPUT


class Level(IntEnum):
    """A binding time, in increasing order."""

    CONSTANT = 0
    REQUEST = 1
    STEP = 2


def binding_times(captured: CapturedGraph) -> dict[Node, Level]:
    """Return the binding time of each node, in one pass over the graph."""
    level: dict[Node, Level] = {}
    for node in captured.nodes:
        if node.op == "placeholder":
            if node is captured.step:
                level[node] = Level.STEP
            else:
                level[node] = Level.CONSTANT if node.name in captured.constants else Level.REQUEST
        elif isinstance(meta(node), (int, torch.SymInt)) and not is_read_from_data(node):
            level[node] = Level.CONSTANT
        else:
            level[node] = max((level[a] for a in node.all_input_nodes), default=Level.CONSTANT)
    return level


def values_of_adapters(captured: CapturedGraph, level: Mapping[Node, Level]) -> set[Node]:
    """Return the values of the request that follow from nothing but the numbers of the rows' adapters."""
    source = captured.inputs.get(ADAPTER_INPUT)
    found: set[Node] = {source} if source is not None else set()
    for node in captured.nodes:
        above = [a for a in node.all_input_nodes if level[a] != Level.CONSTANT]
        if above and all(a in found for a in above):
            found.add(node)
    return found


def is_fixed(node: Node) -> bool:
    """Return whether a constant depends on no free size."""
    visited, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        if isinstance(meta(current), torch.SymInt):
            return False
        pending.extend(current.all_input_nodes)
    return True


@dataclass(frozen=True)
class PaddingTest:
    """An operation from token ids to booleans that answers `usual` for all ids except `padding` (None: for all ids)."""

    node: Node
    usual: bool
    padding: int | None


def padding_tests(captured: CapturedGraph, name: str) -> list[PaddingTest]:
    """Return every padding test of an input, found by running operations on all ids of the vocabulary.

    An input of numbers has none, because no number of a series stands for padding.
    """
    if meta(captured.inputs[name]).dtype not in IDS:
        return []
    ids = torch.arange(max(3, count_ids(captured, name)))
    carriers, tests = {captured.inputs[name]}, []
    for node in captured.nodes:
        if node.op != "call_function" or not any(a in carriers for a in node.all_input_nodes):
            continue
        value = meta(node)
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype == torch.bool:
            answer = _exceptional_id(captured, node, ids)
            if answer is not None:
                tests.append(PaddingTest(node, *answer))
        elif value.dtype in IDS and _only_moves(node, carriers):
            carriers.add(node)
    return tests


def _only_moves(node: Node, carriers: set[Node]) -> bool:
    tensors = [a for a in node.all_input_nodes if isinstance(meta(a), torch.Tensor)]
    return len(tensors) == 1 and tensors[0] in carriers and node.target in ID_MOVES


def _exceptional_id(captured: CapturedGraph, node: Node, ids: torch.Tensor) -> tuple[bool, int | None] | None:
    """Return the usual answer and the one id with the other answer (None if there is no such id).

    Return None if several ids have the other answer, or if the operation is not elementwise.
    """

    variable = [a for a in node.all_input_nodes if a.name not in captured.constants]
    if len(variable) != 1:  # a comparison of two values that depend on ids, or with a size
        return None

    def operand(argument: Node) -> Any:
        return captured.constants.get(argument.name, ids)

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
    try:
        answers = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError):
        return None
    if not isinstance(answers, torch.Tensor) or answers.shape != ids.shape:
        return None
    for usual in (True, False):
        odd = (answers != usual).nonzero().flatten().tolist()
        if len(odd) <= 1:
            return usual, odd[0] if odd else None
    return None
