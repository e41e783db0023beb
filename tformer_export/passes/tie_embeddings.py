"""Store an embedding table and an equal, transposed output projection once, transposed when the file is loaded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def run(model: ir.Model) -> int:
    """Replace each matrix that is a transposed embedding table, in place, and return how many there were.

    Cost: matrices of the transposed shape are compared number by number.
    """
    graphs = (model.graph, *model.graph.subgraphs())
    tables = {
        node.inputs[0]: None
        for graph in graphs
        for node in graph
        if node.op_type == "Gather" and node.inputs[0] is not None and _is_matrix(node.inputs[0])
    }
    tied_count = 0
    for value in list(model.graph.initializers.values()):
        for table in tables:
            if _is_matrix(value) and _is_transposed(value, table):
                transpose = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{table.name}.transposed")
                transpose.outputs[0].name, transpose.outputs[0].type = f"{table.name}.turned", value.type
                model.graph.insert_before(model.graph[0], transpose)
                value.replace_all_uses_with(transpose.outputs[0])
                del model.graph.initializers[str(value.name)]
                tables.pop(value, None)  # a table that is the transpose of another one
                tied_count += 1
                break
    return tied_count


def _is_matrix(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 2


def _is_transposed(value: ir.Value, table: ir.Value) -> bool:
    one, other = value.const_value, table.const_value
    assert one is not None
    assert other is not None
    if value is table or one.dtype != other.dtype or list(one.shape) != list(other.shape)[::-1]:
        return False
    return bool(np.array_equal(one.numpy(), other.numpy().T))
