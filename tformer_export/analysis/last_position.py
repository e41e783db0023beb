"""A model that gives logits of the last position alone, as many do whose `forward` is written for generation.

The file needs them for each position that is fed to it. What stands above the pick of the last position works on a row
for each position as well as on one, so the pick is taken out. That it is one is seen on values: its result is the last
row of its operand, for numbers drawn at random. The gate then asks the source for each position by what comes before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import fake_mode
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, meta


def give_every_position(captured: Captured) -> bool:
    """Take the pick of the last position out, if the output depends on the step input through nothing else.

    Returns whether it was there and is gone; else the graph is as it was.
    """
    if captured.time is None or _time_axis(captured, captured.output) is not None:
        return False
    values = run(captured, captured.example)
    picks = {node: node.all_input_nodes[0] for node in captured.nodes if _is_pick(captured, node, values)}
    above = _above(captured, set(picks))
    if above is None:
        return False
    try:
        metas = _with_time(captured, picks, above)
    except (RuntimeError, IndexError, TypeError, ValueError):  # what cannot be done to several positions at once
        return False
    shape = metas[captured.output].shape
    if len(shape) != 3 or expression(shape[1]) != captured.time:
        return False
    for node, value in metas.items():
        node.meta["val"] = value
    for pick, operand in picks.items():
        pick.replace_all_uses_with(operand)
    captured.output = picks.get(captured.output, captured.output)
    captured.graph.eliminate_dead_code()
    return True


def _time_axis(captured: Captured, node: Node) -> int | None:
    value = meta(node)
    axes = [a for a, size in enumerate(value.shape) if expression(size) == captured.time]
    return axes[0] if len(axes) == 1 else None


def _is_pick(captured: Captured, node: Node, values: dict[Node, Any]) -> bool:
    """Whether a value is the last row, along time, of the tensor that it is made of; the axis may be gone."""
    if node.op != "call_function" or not isinstance(meta(node), torch.Tensor) or not node.all_input_nodes:
        return False
    operand = node.all_input_nodes[0]
    if not isinstance(meta(operand), torch.Tensor) or not meta(node).is_floating_point():
        return False
    axis = _time_axis(captured, operand)
    if axis is None or any(captured.time in expression(size).free_symbols for size in meta(node).shape):
        return False
    last, found = values[operand].narrow(axis, -1, 1), values[node]
    return any(found.shape == row.shape and torch.equal(found, row) for row in (last, last.squeeze(axis)))


def _above(captured: Captured, picks: set[Node]) -> list[Node] | None:
    """The nodes between the picks and the output, in order; None if the step input reaches the output past them."""
    depends = {captured.step}
    above: set[Node] = set()
    for node in captured.nodes:
        if node in picks:
            above.add(node)
        elif any(operand in above for operand in node.all_input_nodes):
            above.add(node)
            if any(operand in depends for operand in node.all_input_nodes):
                return None
        elif any(operand in depends for operand in node.all_input_nodes) and isinstance(meta(node), torch.Tensor):
            depends.add(node)
    if captured.output not in above:
        return None
    return [node for node in captured.nodes if node in above and node not in picks and node.op == "call_function"]


def _with_time(captured: Captured, picks: dict[Node, Node], above: list[Node]) -> dict[Node, Any]:
    """The traced values of what stands above the picks, if these gave every position."""
    metas: dict[Node, Any] = {pick: meta(operand) for pick, operand in picks.items()}

    def value(node: Node) -> Any:
        return metas[node] if node in metas else meta(node)

    with fake_mode(captured.output):
        for node in above:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
            metas[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return metas
