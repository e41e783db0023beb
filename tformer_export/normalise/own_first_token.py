"""A forward that replaces the first token of the step input by its own.

Code for training takes labels and puts a token in front of them. The step input of a file has another token there: the
token that decoding starts with. `StepPositions` cuts it off before forward runs. The cut moves all rows by a position,
and the token in front moves them back. A step cannot compute rows that move. The rewritten graph fills the first
position of the step input with the token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, expression, meta


def fill_first_position(captured: CapturedGraph) -> bool:
    """Rewrite a graph that puts a token in front of the rest of the step input, in place; return whether it does.

    Cost: two runs of the graph on the example.
    """
    step = captured.step
    if step is None or captured.time is None or not any(map(_cuts_first, step.users)):
        return False
    name, example = captured.step_name or "", captured.example
    runs = [run(captured, inputs) for inputs in (example, {**example, name: example[name].roll((1, 1), (0, 1))})]
    for node in _below_step(captured, step):
        for order in ([0, 1], [1, 0]):
            time = order.index(1)
            if expression(meta(node).shape[time]) != captured.time:
                continue
            token = runs[0][node].flatten()[0]
            if all(_is_step_behind(values[node], token, values[step].permute(order), time) for values in runs):
                _replace_by_filled_step(captured, step, node, int(token), order)
                return True
    return False


def _is_step_behind(value: torch.Tensor, token: torch.Tensor, ids: torch.Tensor, time: int) -> bool:
    """Return whether a value holds the ids, and this token at position 0. time: the time axis of both."""
    if value.shape != ids.shape:
        return False
    ids = ids.to(value.dtype)
    others = [tensor.narrow(time, 1, tensor.shape[time] - 1) for tensor in (value, ids)]
    return bool((value.select(time, 0) == token).all()) and torch.equal(*others)


def _replace_by_filled_step(captured: CapturedGraph, step: Node, node: Node, token: int, order: list[int]) -> None:
    make = NodeBuilder(captured.graph, node)
    is_first = make(aten.eq.Scalar, make(aten.arange.default, make.size(step, 1)), 0)
    filled = make(aten.masked_fill.Scalar, step, is_first, token)
    if meta(node).dtype != meta(step).dtype:
        filled = make(aten._to_copy.default, filled, dtype=meta(node).dtype)
    if order != [0, 1]:
        filled = make(aten.permute.default, filled, order)
    node.replace_all_uses_with(filled)
    captured.graph.eliminate_dead_code()


def _cuts_first(node: Node) -> bool:
    """Return whether a node is step[:, 1:]."""
    return node.target is aten.slice.Tensor and tuple(node.args[1:3]) == (1, 1) and len(node.args) < 5


def _below_step(captured: CapturedGraph, step: Node) -> Iterator[Node]:
    """Yield the values (batch, time) or (time, batch) that depend on the step input."""
    found = {step}
    for node in captured.nodes:
        if isinstance(meta(node), torch.Tensor) and any(n in found for n in node.all_input_nodes):
            found.add(node)
            if meta(node).dim() == 2:
                yield node
