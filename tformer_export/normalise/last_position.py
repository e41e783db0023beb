"""Models that return logits of the last position alone, as many whose `forward` was written for generation do.

The file needs logits for each position that it reads. The layers above the selection of the last position work on a row
for each position as well as on one row, so the selection is removed. It is recognised by values: its result is the last
row of its operand, for random numbers. The gate then compares each position with the source's result for the positions
up to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import fake_mode
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, meta


def keep_all_positions(captured: CapturedGraph) -> bool:
    """Remove the selection of the last position, if the output depends on the step input only through it.

    Return whether it was removed. Otherwise the graph is unchanged.
    """
    if captured.time is None or _time_axis(captured, captured.output) is not None:
        return False
    values = run(captured, captured.example)
    picks = {node: node.all_input_nodes[0] for node in captured.nodes if _is_pick(captured, node, values)}
    nodes_above = _nodes_above(captured, set(picks))
    if nodes_above is None:
        return False
    try:
        metas = _with_time(captured, picks, nodes_above)
    except (RuntimeError, IndexError, TypeError, ValueError):  # an operation that several positions do not allow
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


def _time_axis(captured: CapturedGraph, node: Node) -> int | None:
    value = meta(node)
    axes = [a for a, size in enumerate(value.shape) if expression(size) == captured.time]
    return axes[0] if len(axes) == 1 else None


def _is_pick(captured: CapturedGraph, node: Node, values: dict[Node, Any]) -> bool:
    """Return whether a value is the last row, along time, of its first operand; the axis may be dropped."""
    if node.op != "call_function" or not isinstance(meta(node), torch.Tensor) or not node.all_input_nodes:
        return False
    operand = node.all_input_nodes[0]
    if not isinstance(meta(operand), torch.Tensor) or not meta(node).is_floating_point():
        return False
    axis = _time_axis(captured, operand)
    if axis is None or any(captured.time in expression(size).free_symbols for size in meta(node).shape):
        return False
    last, result = values[operand].narrow(axis, -1, 1), values[node]
    return any(result.shape == row.shape and torch.equal(result, row) for row in (last, last.squeeze(axis)))


def _nodes_above(captured: CapturedGraph, picks: set[Node]) -> list[Node] | None:
    """Return the nodes between the selections and the output, in order.

    Return None if the step input reaches the output past the selections.
    """
    step_nodes = {captured.step}
    above: set[Node] = set()
    for node in captured.nodes:
        if node in picks:
            above.add(node)
        elif any(operand in above for operand in node.all_input_nodes):
            above.add(node)
            if any(operand in step_nodes for operand in node.all_input_nodes):
                return None
        elif any(operand in step_nodes for operand in node.all_input_nodes) and isinstance(meta(node), torch.Tensor):
            step_nodes.add(node)
    if captured.output not in above:
        return None
    return [node for node in captured.nodes if node in above and node not in picks and node.op == "call_function"]


def _with_time(captured: CapturedGraph, picks: dict[Node, Node], above: list[Node]) -> dict[Node, Any]:
    """Return the traced values of the selections and the nodes above them for all positions."""
    metas: dict[Node, Any] = {pick: meta(operand) for pick, operand in picks.items()}

    def value(node: Node) -> Any:
        return metas[node] if node in metas else meta(node)

    with fake_mode(captured.output):
        for node in above:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
            metas[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return metas
