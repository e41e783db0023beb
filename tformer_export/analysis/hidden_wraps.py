"""`x.roll(1, 1)` whose first row forward overwrites: the previous position of each, written as a rotation.

A rotation puts the last rows in front of the first. So the first positions look ahead, unless forward hides these rows:
`y = x.roll(1, 1); y[:, 0] = 0`. Then zeros stand in their place in the rewritten graph, and each position looks back.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, expression, meta
from tformer_export.common.module_state import is_same

LOUDNESS = 1.0, 1000.0  # of the numbers in the place of the rows, which must not change a result


def replace_hidden_wraps(captured: CapturedGraph) -> int:
    """Put zeros in the place of wrapped rows that no result depends on, in place, and return the number of rotations.

    Cost: a run of the graph on the example, and two for each rotation along the positions.
    """
    rotations = [node for node in captured.nodes if _shift(captured, node) is not None]
    if not rotations:
        return 0
    values = run(captured, captured.example)
    hidden = [node for node in rotations if _hides_wrapped_rows(captured, node, values[node], values[captured.output])]
    for node in hidden:
        _look_back(captured, node)
    return len(hidden)


def _shift(captured: CapturedGraph, node: Node) -> tuple[int, int] | None:
    """Return by how many positions a node rotates a value towards the end, and the axis; None if it does not."""
    if node.target is not aten.roll.default or len(node.args) < 3:
        return None
    shifts, axes = node.args[1:]
    assert isinstance(shifts, (list, tuple))
    assert isinstance(axes, (list, tuple))
    if len(shifts) != 1 or len(axes) != 1 or not isinstance(shifts[0], int) or shifts[0] < 1:
        return None
    axis = int(axes[0]) % meta(node).dim()  # type: ignore[arg-type]
    is_time = captured.time is not None and expression(meta(node).shape[axis]) == captured.time
    return (shifts[0], axis) if is_time else None


def _hides_wrapped_rows(captured: CapturedGraph, node: Node, value: torch.Tensor, output: torch.Tensor) -> bool:
    shift, axis = _shift(captured, node) or (0, 0)
    generator = torch.Generator().manual_seed(0)
    for loudness in LOUDNESS:
        changed = value.clone()
        wrapped = changed.narrow(axis, 0, min(shift, changed.shape[axis]))
        wrapped.copy_(torch.randn(wrapped.shape, generator=generator) * loudness)
        if not is_same(run(captured, captured.example, {node: changed})[captured.output], output):
            return False
    return True


def _look_back(captured: CapturedGraph, node: Node) -> None:
    shift, axis = _shift(captured, node) or (0, 0)
    make, source = NodeBuilder(captured.graph, node), node.args[0]
    assert isinstance(source, Node)
    sizes = [make.size(source, i) if i != axis else shift for i in range(meta(node).dim())]
    zeros = make(aten.full.default, sizes, 0, dtype=meta(node).dtype)
    padded = make(aten.cat.default, [zeros, source], axis)
    shifted = make(aten.slice.Tensor, padded, axis, 0, make.size(source, axis))
    node.replace_all_uses_with(shifted)
    captured.graph.erase_node(node)
