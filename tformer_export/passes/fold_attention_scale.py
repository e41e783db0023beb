"""Apply the scale of an attention to its queries instead of its scores, and fold it into the weights of the queries.

onnxruntime's kernels for the products of a single row require a scale of 1, and `full_score_attention.py` uses these
kernels.

MultiHeadAttention over given keys and values would be faster too, but is not changed. The products of a single row
sum the last columns in another order than the rest. So the last bits of a row's result would depend on the length of
its neighbours' context. GroupQueryAttention reads the length of each row alone. Figures: docs/design/kernels.md.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, derived_tensor, is_float_weight, only_user


def run(model: ir.Model, operator: str = "GroupQueryAttention") -> int:
    """Fold the scales in place, and return the number of attentions whose scale is 1 now.

    Where the queries are the result of a projection, its weights are scaled and no operator remains. Otherwise one Mul
    scales the queries.
    """
    folded_count = 0
    for node in [node for node in model.graph.all_nodes() if node.op_type == operator]:
        attribute, query = node.attributes.get("scale"), node.inputs[0]
        packed = node.inputs[1] is None  # queries, keys and values are one tensor
        if attribute is None or attribute.as_float() == 1.0 or query is None or packed:
            continue
        scale = attribute.as_float()
        if not _into_projection(model, query, scale):
            _multiply(model, node, scale)
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
        folded_count += 1
    return folded_count


def _into_projection(model: ir.Model, query: ir.Value, scale: float) -> bool:
    """Scale the weight and the bias of the projection that computes a value; return False if others read the weight."""
    bias_sum, bias_index = query.producer(), None
    if bias_sum is not None and bias_sum.op_type == "Add" and only_user(query) is not None:
        bias_index = next((i for i, value in enumerate(bias_sum.inputs) if is_float_weight(value, 1)), None)
        query = bias_sum.inputs[1 - bias_index] or query if bias_index is not None else query
    product = query.producer()
    if product is None or product.op_type != "MatMul" or only_user(query) is None:
        return False
    weight = product.inputs[1]
    if weight is None or not is_float_weight(weight, 2) or only_user(weight) is None:
        return False
    _scale(weight, scale)
    if bias_sum is not None and bias_index is not None:
        # The scaled bias is a new constant because other nodes may read the bias, such as one of zeros.
        bias = bias_sum.inputs[bias_index]
        assert bias is not None
        assert bias.const_value is not None
        numbers = bias.const_value.numpy() * np.float32(scale)
        bias_sum.replace_input_with(bias_index, constant(model, f"{bias_sum.outputs[0].name}.bias", numbers))
    return True


def _scale(value: ir.Value, scale: float) -> None:
    weight = value.const_value
    assert weight is not None
    value.const_value = derived_tensor(weight, lambda array: array * np.float32(scale), name=weight.name)


def _multiply(model: ir.Model, node: ir.Node, scale: float) -> None:
    """Scale the queries of an attention by one Mul."""
    number = constant(model, f"attention.scale.{scale:.9g}", np.array(scale, np.float32))
    query = node.inputs[0]
    assert query is not None
    assert node.graph is not None
    product = ir.node("Mul", [query, number], name=f"{node.name}.scaled")
    scaled = product.outputs[0]
    scaled.name, scaled.shape, scaled.type = f"{node.outputs[0].name}.scaled", query.shape, query.type
    node.graph.insert_before(node, product)
    node.replace_input_with(0, scaled)
