"""Rows that a mask selects, changed and put back, as one expression of all rows.

`out[chosen] = expert(x[chosen])` computes for as many rows as the data choose. A file has a row for every position. Its
expert runs on all rows, and `torch.where` keeps the chosen rows. The numbers are the same if the expert computes each
row from itself alone. Random masks test this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.analysis.interpreter import call, run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, meta
from tformer_export.common.module_state import is_same

TRIED_MASKS = 3


def keep_all_rows(captured: CapturedGraph) -> None:
    """Rewrite the graph in place where rows are selected and put back. Other selections stay.

    Cost: a run of the graph on its example if there is any selection, and some runs of the operations between.
    """
    puts = [node for node in captured.nodes if node.target is aten.index_put.default and _mask(node) is not None]
    if not puts:
        return
    try:
        values = run(captured, captured.example)
    except (RuntimeError, IndexError):
        return  # staging reports the error
    for put in puts:
        mask = _mask(put)
        between = _between(put)
        if mask is not None and between is not None and _rows_are_apart(put, mask, between, values):
            put.replace_all_uses_with(_of_all_rows(captured, put, mask, between))
    captured.graph.eliminate_dead_code()


def _mask(node: Node) -> Node | None:
    """Return the mask by which an operation selects rows, if it selects by one mask alone."""
    indices = node.args[1] if len(node.args) > 1 else None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], Node):
        return None
    return indices[0] if meta(indices[0]).dtype is torch.bool else None


def _between(put: Node) -> list[Node] | None:
    """Return the operations from the selection of rows to where they are put back, in the order of the graph.

    None if they read rows of another selection, or a number of rows.
    """
    mask, (_, _, rows, *_) = _mask(put), put.args
    inside: set[Node] = set()
    todo = [rows]
    while todo:
        node = todo.pop()
        if node in inside or not isinstance(node, Node) or not _has_selected_rows(node):
            continue
        inside.add(node)
        if node.target is aten.index.Tensor and _mask(node) is mask:
            continue
        if node.op != "call_function" or node.target is aten.index.Tensor or isinstance(meta(node), torch.SymInt):
            return None
        todo.extend(node.all_input_nodes)
    if not any(node.target is aten.index.Tensor for node in inside):
        return None
    return [node for node in put.graph.nodes if node in inside]


def _has_selected_rows(node: Node) -> bool:
    value = meta(node)
    return bool(free_unbacked_symbols(value.shape if isinstance(value, torch.Tensor) else value))


def _all_rows(selection: Node, mask: Node) -> list[int]:
    """Return the shape of all rows of a selected value, with one axis for those of the mask."""
    return [-1, *meta(selection.args[0]).shape[meta(mask).dim() :]]


def _rows_are_apart(put: Node, mask: Node, between: list[Node], values: Mapping[Node, Any]) -> bool:
    """Return whether the operations give the chosen rows the numbers that all rows together get, for random masks."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIED_MASKS):
        chosen = torch.rand(values[mask].shape, generator=generator) < 0.5
        all_rows, few_rows = dict(values), {**values, mask: chosen}
        try:
            with torch.no_grad():
                for node in between:
                    few_rows[node] = call(node, few_rows.__getitem__)
                    is_selection = node.target is aten.index.Tensor
                    all_rows[node] = (
                        values[node.args[0]].reshape(_all_rows(node, mask))  # type: ignore[index]
                        if is_selection
                        else call(node, all_rows.__getitem__)
                    )
        except (RuntimeError, IndexError, ValueError):
            return False
        rows: Any = put.args[2]
        if len(all_rows[rows]) != chosen.numel() or not is_same(all_rows[rows][chosen.flatten()], few_rows[rows]):
            return False
    return True


def _of_all_rows(captured: CapturedGraph, put: Node, mask: Node, between: list[Node]) -> Node:
    """Add the operations of all rows, and return the value with the chosen ones."""
    build = NodeBuilder(captured.graph, put)
    new: dict[Node, Node] = {}
    for node in between:
        if node.target is aten.index.Tensor:
            whole: Any = node.args[0]
            new[node] = whole if meta(mask).dim() == 1 else build(aten.reshape.default, whole, _all_rows(node, mask))
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
            new[node] = build(node.target, *args, **kwargs)  # type: ignore[arg-type]
    whole, rows = put.args[0], new[put.args[2]]  # type: ignore[index]
    accumulates = len(put.args) > 3 and bool(put.args[3])
    axes = meta(whole).dim() - meta(mask).dim()
    shown = mask
    for _ in range(axes):
        shown = build(aten.unsqueeze.default, shown, -1)
    if meta(mask).dim() > 1:
        rows = build(aten.reshape.default, rows, [build.size(whole, axis) for axis in range(meta(whole).dim())])
    if accumulates:
        return build(aten.where.self, shown, build(aten.add.Tensor, whole, rows), whole)
    return build(aten.where.self, shown, rows, whole)
