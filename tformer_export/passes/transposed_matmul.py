"""A product with a table turned round reads the table as it lies, instead of a second copy that onnxruntime would make.

FusedMatMul is onnxruntime's own operator, so a portable file keeps the Transpose.
"""

from __future__ import annotations

import onnx_ir as ir

CONTRIB = "com.microsoft"


def run(model: ir.Model) -> int:
    fused = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            table = _turned(node.inputs[1]) if node.op_type == "MatMul" and not node.domain else None
            if table is None:
                continue
            product = ir.node(
                "FusedMatMul", [node.inputs[0], table], {"transB": 1}, domain=CONTRIB, version=1, name=node.name
            )
            result, name = node.outputs[0], node.outputs[0].name
            product.outputs[0].type, product.outputs[0].shape = result.type, result.shape
            graph.insert_before(node, product)
            result.replace_all_uses_with(product.outputs[0], replace_graph_outputs=True)
            graph.remove(node, safe=True)
            product.outputs[0].name = name
            fused += 1
    if fused:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return fused


def _turned(value: ir.Value | None) -> ir.Value | None:
    """The weight of which a value is the transpose."""
    turn = value.producer() if value is not None else None
    if turn is None or turn.op_type != "Transpose" or turn.inputs[0] is None or turn.inputs[0].const_value is None:
        return None
    table, order = turn.inputs[0], turn.attributes.get("perm")
    assert table.const_value is not None
    matrix = len(table.const_value.shape) == 2 and table.const_value.dtype == ir.DataType.FLOAT
    return table if matrix and (order is None or list(order.as_ints()) == [1, 0]) else None
