"""Rows that take the place of placeholders: `embeddings.masked_scatter(is_placeholder, rows)`.

A model that reads images in a text computes a number of rows for each image and puts them, in order, where its ids
are placeholders. `masked_scatter` and `embeddings[is_placeholder] = rows` do so for all rows of a batch at once, so
that one row of the batch depends on the placeholders of those before it. Each sequence has as many placeholders as
rows of its own, so the same follows from the sequence alone: placeholder number n of a sequence takes its row n.

    count  = (is_placeholder[:, None, :] & causal).sum(-1)      # placeholders up to each position
    result = where(is_placeholder, rows[sequence, count - 1], embeddings)

Staging handles these operations as it does any others: the rows follow from the request, and `is_placeholder` is
cached, because a count needs all earlier positions. A row that holds NaN stands for no row: the placeholder keeps its
own embedding. The runtime ends the rows of each sequence with NaN, so that a placeholder that the model generates
itself takes no row, as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import arguments, aten, expression, meta

_RESHAPES = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints)


@dataclass(frozen=True)
class _Placement:
    """values: (batch, time, d). mask: (batch, time) bool. rows: any shape, of d · (rows of all sequences) numbers."""

    values: Node
    mask: Node
    rows: Node


def place_by_count(captured: CapturedGraph) -> int:
    """Rewrite the graph in place, and return the number of placements. Linear in the number of nodes."""
    count = 0
    for node in captured.nodes:
        placement = _read(node)
        layout = None if placement is None else _rows_layout(captured, placement)
        if placement is not None and layout is not None:
            node.replace_all_uses_with(_place(NodeBuilder(captured.graph, node), placement, *layout))
            if captured.output is node:
                captured.output = node
            count += 1
    if count:
        captured.graph.eliminate_dead_code()
        captured.graph.lint()
    return count


def _read(node: Node) -> _Placement | None:
    """Read a placement of whole rows of the last axis; None for other operations."""
    if node.target is aten.masked_scatter.default:
        values, mask, rows = arguments(node)
        if meta(values).dim() != 3:
            return None
        mask = _mask_of_rows(mask)
    elif node.target is aten.index_put.default:
        values, indices, rows = arguments(node)[:3]
        accumulates = node.kwargs.get("accumulate", len(arguments(node)) > 3 and arguments(node)[3])
        if accumulates or len(indices) != 1 or meta(values).dim() != 3 or meta(rows).dim() < 2:
            return None
        mask = indices[0] if meta(indices[0]).dtype == torch.bool and meta(indices[0]).dim() == 2 else None
    else:
        return None
    return None if mask is None else _Placement(values, mask, rows)


def _mask_of_rows(mask: Node) -> Node | None:
    """Return the mask (batch, time) of which a mask (batch, time, 1), or a copy of it along d, was made."""
    while mask.target is aten.expand.default:
        mask = arguments(mask)[0]
    if mask.target is aten.unsqueeze.default and arguments(mask)[1] in (-1, 2) and meta(mask).dim() == 3:
        inner: Node = arguments(mask)[0]
        return inner
    return None


def _rows_layout(captured: CapturedGraph, placement: _Placement) -> tuple[Node, int, sympy.Expr, int] | None:
    """Return the placeholder and the axis that count the items of a sequence, and their number and rows each.

    The rows of all sequences are batch · items · (rows of an item), where the number of items is an axis of an input.
    Return None if they are not.
    """
    total = sympy.Integer(1)
    for size in meta(placement.rows).shape:
        total *= expression(size)
    width = expression(meta(placement.values).shape[2])
    batch = expression(meta(placement.values).shape[0])
    for node in captured.inputs.values():
        if node is captured.step or meta(node).dim() < 2:
            continue
        if expression(meta(node).shape[0]) != batch:
            continue
        items = expression(meta(node).shape[1])
        each = sympy.simplify(total / (width * batch * items))
        if each.is_Integer and items.is_Symbol:
            return node, 1, items, int(each)
    return None


def _place(make: NodeBuilder, placement: _Placement, source: Node, axis: int, _: Any, each: int) -> Node:
    values, mask = placement.values, placement.mask
    width = int(meta(values).shape[2])
    batch, items, time = make.size(source, 0), make.size(source, axis), make.size(mask, 1)
    rows = make(aten.reshape.default, placement.rows, [batch, items, each, width])
    causal = make(aten.tril.default, make(aten.ones.default, [time, time], dtype=torch.bool))
    seen = make(aten.bitwise_and.Tensor, make(aten.unsqueeze.default, mask, 1), causal)
    count = make(aten.sum.dim_IntList, seen, [-1], dtype=torch.int64)
    index = make(aten.clamp.default, make(aten.sub.Tensor, count, 1), 0)
    last = make(
        aten.sub.Tensor, make(aten.mul.Tensor, make(aten.scalar_tensor.default, items, dtype=torch.int64), each), 1
    )
    index = make(aten.minimum.default, index, last)
    item = make(aten.div.Tensor_mode, index, each, rounding_mode="floor")
    within = make(aten.sub.Tensor, index, make(aten.mul.Tensor, item, each))
    sequence = make(aten.unsqueeze.default, make(aten.arange.default, batch), 1)
    taken = make(aten.index.Tensor, rows, [sequence, item, within])
    first = make(aten.slice.Tensor, taken, -1, 0, 1)
    is_row = make(aten.bitwise_and.Tensor, make(aten.unsqueeze.default, mask, -1), make(aten.eq.Tensor, first, first))
    return make(aten.where.self, is_row, taken, values)
