"""MultiHeadAttention over given keys and values as what it is: two products with a softmax between them.

Which is the faster depends on the sizes and on the machine, so it is one of the forms that `tune` measures. The
operator alone is the slower one (`fold_attention_scale.py`), but little of a request is spent in it. Times as long with
products, medians of ratios by turns ± half the distance of their quartiles, of requests that read 32 tokens and decode
32, for 1, 8 and 32 rows: 0.996 ± 0.009, 0.987 ± 0.007 and 0.999 ± 0.018 in float32, 0.96 ± 0.03, 0.97 ± 0.09 and 1.00 ±
0.09 with int8 (6+6 layers, d = 512, one thread of a Xeon on which others were at work). With beams on one row of the
context products lose, so that the operator is the default.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.passes.transposed_matmul import CONTRIB

BIAS = 5  # of the operator's inputs


def run(model: ir.Model, stage: str) -> int:
    """stage: what its nodes' names begin with."""
    nodes = [
        node
        for node in model.graph.all_nodes()
        if node.op_type == "MultiHeadAttention" and (node.name or "").startswith(stage)
    ]
    for node in nodes:
        _write_out(model, node)
    return len(nodes)


def _write_out(model: ir.Model, node: ir.Node) -> None:
    """query (B, N, H · D), key and value (B, H, S, D), bias that broadcasts to (B, H, N, S)."""
    query, key, value = node.inputs[:3]
    bias = node.inputs[BIAS] if len(node.inputs) > BIAS else None
    heads, scale = node.attributes["num_heads"].as_int(), node.attributes["scale"].as_float()
    result = node.outputs[0]
    apart, joined = (
        constant(model, f"shape.{'.'.join(map(str, shape))}", np.array(shape, np.int64))
        for shape in ((0, 0, heads, -1), (0, 0, -1))
    )
    turned = {"perm": [0, 2, 1, 3]}
    made = [ir.node("Reshape", [query, apart])]
    made.append(ir.node("Transpose", made[-1].outputs, turned))
    scaled = {"transB": 1, "alpha": scale}
    made.append(ir.node("FusedMatMul", [made[-1].outputs[0], key], scaled, domain=CONTRIB, version=1))
    if bias is not None:
        made.append(ir.node("Add", [made[-1].outputs[0], bias]))
    made.append(ir.node("Softmax", made[-1].outputs, {"axis": -1}))
    made.append(ir.node("MatMul", [made[-1].outputs[0], value]))
    made.append(ir.node("Transpose", made[-1].outputs, turned))
    made.append(ir.node("Reshape", [made[-1].outputs[0], joined]))
    for i, part in enumerate(made):
        part.name = f"{node.name}.{i}"
        part.outputs[0].name = f"{result.name}.{i}"
        part.outputs[0].dtype = ir.DataType.FLOAT
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, made)
    new, name = made[-1].outputs[0], result.name
    new.shape, new.type = result.shape, result.type
    result.replace_all_uses_with(new, replace_graph_outputs=True)
    result.name = f"{name}.fused"
    new.name = name  # which may be the name of a graph's output
    node.graph.remove(node, safe=True)
    model.graph.opset_imports.setdefault(CONTRIB, 1)
