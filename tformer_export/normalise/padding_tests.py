"""Tests "is this token padding?", as their answer for a valid token."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import padding_tests
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, meta


def fold_padding_tests(captured: CapturedGraph, pad: int | None) -> int:
    """Replace "is this token of the step input padding?" by its answer for a valid token, in place.

    Return how many of them ask for the declared padding. If any does, forward treats it in another way than other ids,
    and a file must not generate it.

    pad: the id that is declared as padding; None folds only tests with the same answer for every id. A test for another
        id, such as a separator, is data like any other.
    """
    if captured.step_name is None:
        return 0
    count = 0
    for test in padding_tests(captured, captured.step_name):
        if test.padding is not None and test.padding != pad:
            continue
        count += test.padding is not None
        with captured.graph.inserting_before(test.node):
            sizes = [_size(captured, test.node, axis) for axis in range(meta(test.node).dim())]
            folded = captured.graph.call_function(aten.full.default, (sizes, test.usual), {"dtype": torch.bool})
        folded.meta = dict(test.node.meta)
        test.node.replace_all_uses_with(folded)
    captured.graph.eliminate_dead_code()
    return count


def _size(captured: CapturedGraph, node: Node, axis: int) -> Any:
    """Return the size of an axis of a node that will be removed, read from the operand from which the node has it."""
    size = meta(node).shape[axis]
    if not isinstance(size, torch.SymInt):
        return int(size)
    source, source_axis = next(
        (a, i)
        for a in node.all_input_nodes
        if isinstance(meta(a), torch.Tensor)
        for i, s in enumerate(meta(a).shape)
        if isinstance(s, torch.SymInt) and s.node.expr == size.node.expr
    )
    size_node = captured.graph.call_function(aten.sym_size.int, (source, source_axis))
    size_node.meta["val"] = size
    return size_node
