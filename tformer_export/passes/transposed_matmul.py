"""Let a product with a transposed table read the table itself, instead of a copy that onnxruntime would make.

FusedMatMul is onnxruntime's own operator, so a portable file keeps the Transpose.
"""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.common.ir_edit import replace_node, transposed_weight

CONTRIB = "com.microsoft"


def run(model: ir.Model) -> int:
    """Replace such products in place, and return how many there were."""
    fused = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            table = transposed_weight(node.inputs[1]) if node.op_type == "MatMul" and not node.domain else None
            if table is None:
                continue
            product = ir.node(
                "FusedMatMul", [node.inputs[0], table], {"transB": 1}, domain=CONTRIB, version=1, name=node.name
            )
            replace_node(node, [product])
            fused += 1
    if fused:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return fused
