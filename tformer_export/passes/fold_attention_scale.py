"""The scale of an attention on its queries instead of its scores, and from there in the weights that make them.

onnxruntime's kernels for the products of a single row are the ones for a scale of 1. `full_score_attention.py` needs
them.

Attention over given keys and values would gain as well: MultiHeadAttention with a mask, 8 heads of 64, one thread of a
Xeon, times as fast as with the scale on its scores. But the products of a single row sum the last columns in another
order than the rest, so that a row's result would depend, in its last bits, on how long the context of its neighbours
is. So it is left as it is. (GroupQueryAttention sees a row's own length alone.)

====  =========  ====  ================  ===================  ===================
rows  positions  this  plain products,   GroupQueryAttention  the same, rows half
                       keys transposed   with the lengths     full on average
====  =========  ====  ================  ===================  ===================
1     40         1.3   1.1               1.2                  \
8     40         1.5   1.1 to 1.4        1.4 to 1.5           2.1
32    40         1.4   1.4 to 1.6        1.4 to 1.5           2.4
8     256        1.1   1.1               1.2                  2.1
32    256        1.3   1.3               1.2                  2.7
====  =========  ====  ================  ===================  ===================

With four beams on each row of the context scale 1 gains nothing, plain products lose (0.7 to 1.1), and
GroupQueryAttention, which reads no padding, takes no several positions of several rows: it would need a file with both
operators, and lengths that are proven from the mask. Batches are of like lengths, so that little of them is padding.
What plain products gain of a whole request is in `decompose_attention.py`: at most some hundredths.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant


def run(model: ir.Model, operator: str = "GroupQueryAttention") -> int:
    """The number of attentions whose scale is 1 now. Where the queries are a projection's, nothing is left to compute;
    else they are multiplied."""
    found = 0
    for node in [node for node in model.graph.all_nodes() if node.op_type == operator]:
        held, query = node.attributes.get("scale"), node.inputs[0]
        packed = node.inputs[1] is None  # keys and values with the queries, in one tensor
        if held is None or held.as_float() == 1.0 or query is None or packed:
            continue
        scale = held.as_float()
        if not _into_projection(model, query, scale):
            _multiply(model, node, scale)
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
        found += 1
    return found


def _into_projection(model: ir.Model, query: ir.Value, scale: float) -> bool:
    """Scale the weight and the bias that a value is made of, if nothing else is made of the weight."""
    offset, at = query.producer(), None
    if offset is not None and offset.op_type == "Add" and _alone(query):
        at = next((i for i, value in enumerate(offset.inputs) if _is_weight(value, 1)), None)
        query = offset.inputs[1 - at] or query if at is not None else query
    product = query.producer()
    if product is None or product.op_type != "MatMul" or not _alone(query):
        return False
    weight = product.inputs[1]
    if weight is None or not _is_weight(weight, 2) or not _alone(weight):
        return False
    _scale(weight, scale)
    if offset is not None and at is not None:  # a bias may be that of others too, such as one of zeros
        held = offset.inputs[at]
        assert held is not None
        assert held.const_value is not None
        numbers = held.const_value.numpy() * np.float32(scale)
        offset.replace_input_with(at, constant(model, f"{offset.outputs[0].name}.bias", numbers))
    return True


def _alone(value: ir.Value) -> bool:
    """Whether only one node reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _is_weight(value: ir.Value | None, rank: int) -> bool:
    held = value.const_value if value is not None else None
    return held is not None and len(held.shape) == rank and held.dtype == ir.DataType.FLOAT


def _scale(value: ir.Value, scale: float) -> None:
    held = value.const_value
    assert held is not None
    shape = ir.Shape([size for size in held.shape if isinstance(size, int)])  # all are known
    value.const_value = ir.LazyTensor(  # held only while it is written
        lambda: ir.tensor(held.numpy() * np.float32(scale)), held.dtype, shape, name=held.name
    )


def _multiply(model: ir.Model, node: ir.Node, scale: float) -> None:
    number = constant(model, f"attention.scale.{scale:.9g}", np.array(scale, np.float32))
    query = node.inputs[0]
    assert query is not None
    assert node.graph is not None
    product = ir.node("Mul", [query, number], name=f"{node.name}.scaled")
    made = product.outputs[0]
    made.name, made.shape, made.type = f"{node.outputs[0].name}.scaled", query.shape, query.type
    node.graph.insert_before(node, product)
    node.replace_input_with(0, made)
