"""Write MultiHeadAttention over given keys and values as two products with a softmax between them.

The faster form depends on the sizes and the machine, so it is a kernel choice that `tune` measures. The operator is the
default. With several beams on one row of the context it is faster. Elsewhere the products are faster by themselves, but
few requests notice. Figures: docs/design/kernels.md#products-and-softmax.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, replace_node
from tformer_export.passes.transposed_matmul import CONTRIB

BIAS = 5  # the index of the bias among the operator's inputs


def run(model: ir.Model, stage: str) -> int:
    """Write the attentions of a stage out in place, and return how many there were.

    stage: the prefix of the names of the stage's nodes.
    """
    nodes = [
        node
        for node in model.graph.all_nodes()
        if node.op_type == "MultiHeadAttention" and (node.name or "").startswith(stage)
    ]
    for node in nodes:
        _write_out(model, node)
    return len(nodes)


def _write_out(model: ir.Model, node: ir.Node) -> None:
    """Replace one attention: query (B, N, H · D), key and value (B, H, S, D), bias that broadcasts to (B, H, N, S)."""
    query, key, value = node.inputs[:3]
    bias = node.inputs[BIAS] if len(node.inputs) > BIAS else None
    heads, scale = node.attributes["num_heads"].as_int(), node.attributes["scale"].as_float()
    result = node.outputs[0]
    split_shape, merged_shape = (
        constant(model, f"shape.{'.'.join(map(str, shape))}", np.array(shape, np.int64))
        for shape in ((0, 0, heads, -1), (0, 0, -1))
    )
    swapped_axes = {"perm": [0, 2, 1, 3]}
    new_nodes = [ir.node("Reshape", [query, split_shape])]
    new_nodes.append(ir.node("Transpose", new_nodes[-1].outputs, swapped_axes))
    scaled = {"transB": 1, "alpha": scale}
    new_nodes.append(ir.node("FusedMatMul", [new_nodes[-1].outputs[0], key], scaled, domain=CONTRIB, version=1))
    if bias is not None:
        new_nodes.append(ir.node("Add", [new_nodes[-1].outputs[0], bias]))
    new_nodes.append(ir.node("Softmax", new_nodes[-1].outputs, {"axis": -1}))
    new_nodes.append(ir.node("MatMul", [new_nodes[-1].outputs[0], value]))
    new_nodes.append(ir.node("Transpose", new_nodes[-1].outputs, swapped_axes))
    new_nodes.append(ir.node("Reshape", [new_nodes[-1].outputs[0], merged_shape]))
    for i, part in enumerate(new_nodes):
        part.name = f"{node.name}.{i}"
        part.outputs[0].name = f"{result.name}.{i}"
        part.outputs[0].dtype = ir.DataType.FLOAT
    replace_node(node, new_nodes)
    model.graph.opset_imports.setdefault(CONTRIB, 1)
