"""Let attention take queries, keys and values packed, as one projection computes them, without a split before it.

GroupQueryAttention takes one tensor of queries, keys and values in this order. It is the whole result of a projection
whose columns are split into the three: docs/design/kernels.md#other-ways-to-write-a-layer.
"""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.passes.column_blocks import find_column_block


def run(model: ir.Model) -> int:
    """Replace the three inputs in place, and return the number of attentions whose inputs are packed now.

    Splits that nothing reads any more stay in the graph.
    """
    count = 0
    for node in model.graph.all_nodes():
        packed = _packed_source(node) if node.op_type == "GroupQueryAttention" else None
        if packed is not None:
            for index, value in enumerate((packed, None, None)):
                node.replace_input_with(index, value)
            count += 1
    return count


def _packed_source(node: ir.Node) -> ir.Value | None:
    """Return the value whose columns are the queries, keys and values of an attention, in this order; None if none."""
    blocks = [find_column_block(value) if value is not None else None for value in node.inputs[:3]]
    query, key, value = blocks
    if query is None or key is None or value is None:
        return None
    whole = find_column_block(query.source)
    is_one_value = query.source is key.source is value.source
    are_neighbours = query.start == 0 and query.stop == key.start and key.stop == value.start
    return query.source if is_one_value and are_neighbours and whole is not None and value.stop == whole.stop else None
