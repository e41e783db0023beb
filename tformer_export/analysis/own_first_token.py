"""A token of forward's own in the place of the first one of the step input.

Code for training takes labels, drops what is behind them and puts a token of its own in front. Its file has another
token there, the one that decoding starts with, which `StepPositions` cuts off before forward sees it. All rows move
forward by the cut and back by the token in front, in whatever way forward writes it, and a step cannot compute rows
that move. The rewritten graph fills the first position of the step input with the token.
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

    Cost: two runs of the graph on the example, and one for the check of the result.
    """
    step = captured.step
    if step is None or captured.time is None or not any(map(_cuts_first, step.users)):
        return False
    first = run(captured, captured.example)
    name = captured.step_name or ""
    other = run(captured, {**captured.example, name: captured.example[name].roll((1, 1), (0, 1))})
    for node in _below_cut(captured, step):
        value = first[node]
        for order in ([0, 1], [1, 0]):
            ids = [values[step].permute(order).to(value.dtype) for values in (first, other)]
            axis = order.index(1)
            if value.shape != ids[0].shape or expression(meta(node).shape[axis]) != captured.time:
                continue
            token = value.flatten()[0]
            if not all(
                bool((values[node].narrow(axis, 0, 1) == token).all())
                and torch.equal(_rest(values[node], axis), _rest(given, axis))
                for values, given in zip((first, other), ids, strict=True)
            ):
                continue
            make = NodeBuilder(captured.graph, node)
            is_first = make(aten.eq.Scalar, make(aten.arange.default, make.size(step, 1)), 0)
            filled = make(aten.masked_fill.Scalar, step, is_first, int(token))
            if value.dtype != first[step].dtype:
                filled = make(aten._to_copy.default, filled, dtype=value.dtype)
            if order != [0, 1]:
                filled = make(aten.permute.default, filled, order)
            node.replace_all_uses_with(filled)
            captured.graph.eliminate_dead_code()
            return True
    return False


def _cuts_first(node: Node) -> bool:
    """Return whether a node is step[:, 1:]."""
    return node.target is aten.slice.Tensor and tuple(node.args[1:3]) == (1, 1) and len(node.args) < 5


def _below_cut(captured: CapturedGraph, step: Node) -> Iterator[Node]:
    """Yield the values (batch, time) or (time, batch) that depend on the step input."""
    found = {step}
    for node in captured.nodes:
        if isinstance(meta(node), torch.Tensor) and any(n in found for n in node.all_input_nodes):
            found.add(node)
            if meta(node).dim() == 2:
                yield node


def _rest(value: torch.Tensor, axis: int) -> torch.Tensor:
    return value.narrow(axis, 1, value.shape[axis] - 1)
