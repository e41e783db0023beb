"""A table that is the output projection too, transposed, is held once and transposed when the file is loaded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def run(model: ir.Model) -> int:
    """Looks at the tables that are gathered from and at the matrices of their shape turned round."""
    graphs = (model.graph, *model.graph.subgraphs())
    tables = {
        node.inputs[0]: None
        for graph in graphs
        for node in graph
        if node.op_type == "Gather" and node.inputs[0] is not None and _is_matrix(node.inputs[0])
    }
    tied = 0
    for value in list(model.graph.initializers.values()):
        for table in tables:
            if _is_matrix(value) and _is_turned(value, table):
                turn = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{table.name}.transposed")
                turn.outputs[0].name, turn.outputs[0].type = f"{table.name}.turned", value.type
                model.graph.insert_before(model.graph[0], turn)
                value.replace_all_uses_with(turn.outputs[0])
                del model.graph.initializers[str(value.name)]
                tied += 1
                break
    return tied


def _is_matrix(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 2


def _is_turned(value: ir.Value, table: ir.Value) -> bool:
    one, other = value.const_value, table.const_value
    assert one is not None
    assert other is not None
    if value is table or one.dtype != other.dtype or list(one.shape) != list(other.shape)[::-1]:
        return False
    return bool(np.array_equal(one.numpy(), other.numpy().T))
