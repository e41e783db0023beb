"""The binding time of every value: is it known for good, once a request, or once a step?

A size does not inherit the binding time of the tensor that it is read from, unless it was counted from data. A value
that follows from the step input through "is this padding?" alone is a constant: rows are right-padded, so valid
positions hold no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.fx import Node

from tformer_export.capture.trace import ID_MOVES, IDS, Captured, ids_of
from tformer_export.common.fx_nodes import aten, is_counted, meta


class Level(IntEnum):
    CONSTANT = 0
    REQUEST = 1
    STEP = 2


def binding_times(captured: Captured) -> dict[Node, Level]:
    """One pass over the graph, in its order."""
    level: dict[Node, Level] = {}
    for node in captured.nodes:
        if node.op == "placeholder":
            if node is captured.step:
                level[node] = Level.STEP
            else:
                level[node] = Level.CONSTANT if node.name in captured.constants else Level.REQUEST
        elif isinstance(meta(node), (int, torch.SymInt)) and not is_counted(node):
            level[node] = Level.CONSTANT
        else:
            level[node] = max((level[a] for a in node.all_input_nodes), default=Level.CONSTANT)
    return level


def is_fixed(node: Node) -> bool:
    """Whether no free size has any part in a constant."""
    seen, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        if isinstance(meta(here), torch.SymInt):
            return False
        todo.extend(here.all_input_nodes)
    return True


def fold_padding_tests(captured: Captured, pad: int | None) -> None:
    """Replace "is this token of the step input padding?" by its answer for a valid token, in place.

    pad: the id that is declared to be padding; None folds only what is the same for every id. A test for another id (a
    separator, say) is data like any other.
    """
    if captured.step_name is None:
        return
    for test in padding_tests(captured, captured.step_name):
        if test.padding is not None and test.padding != pad:
            continue
        with captured.graph.inserting_before(test.node):
            sizes = [_size(captured, test.node, axis) for axis in range(meta(test.node).dim())]
            folded = captured.graph.call_function(aten.full.default, (sizes, test.usual), {"dtype": torch.bool})
        folded.meta = dict(test.node.meta)
        test.node.replace_all_uses_with(folded)
    captured.graph.eliminate_dead_code()


@dataclass(frozen=True)
class PaddingTest:
    """An operation from token ids to booleans that answers `usual` for all ids but one, `padding` (None: for all)."""

    node: Node
    usual: bool
    padding: int | None


def padding_tests(captured: Captured, name: str) -> list[PaddingTest]:
    """Every such operation on an input, found by running it on all ids: the cost is that, over the vocabulary. An input
    of numbers has none: no number of a series stands for padding."""
    if meta(captured.inputs[name]).dtype not in IDS:
        return []
    ids = torch.arange(max(3, ids_of(captured, name)))
    carriers, found = {captured.inputs[name]}, []
    for node in captured.nodes:
        if node.op != "call_function" or not any(a in carriers for a in node.all_input_nodes):
            continue
        value = meta(node)
        if not isinstance(value, torch.Tensor):
            continue
        if value.dtype == torch.bool:
            answer = _odd_one_out(captured, node, ids)
            if answer is not None:
                found.append(PaddingTest(node, *answer))
        elif value.dtype in IDS and _only_moves(node, carriers):
            carriers.add(node)
    return found


def _size(captured: Captured, node: Node, axis: int) -> Any:
    """The size of an axis of a node that is about to go, read from the operand that it has it from."""
    size = meta(node).shape[axis]
    if not isinstance(size, torch.SymInt):
        return int(size)
    source, at = next(
        (a, i)
        for a in node.all_input_nodes
        if isinstance(meta(a), torch.Tensor)
        for i, s in enumerate(meta(a).shape)
        if isinstance(s, torch.SymInt) and s.node.expr == size.node.expr
    )
    read = captured.graph.call_function(aten.sym_size.int, (source, at))
    read.meta["val"] = size
    return read


def _only_moves(node: Node, carriers: set[Node]) -> bool:
    tensors = [a for a in node.all_input_nodes if isinstance(meta(a), torch.Tensor)]
    return len(tensors) == 1 and tensors[0] in carriers and node.target in ID_MOVES


def _odd_one_out(captured: Captured, node: Node, ids: torch.Tensor) -> tuple[bool, int | None] | None:
    """(the usual answer, the one id that gets the other), or None if more ids than one do or it is not elementwise."""

    variable = [a for a in node.all_input_nodes if a.name not in captured.constants]
    if len(variable) != 1:  # a comparison of two things that depend on ids, or with a size
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
