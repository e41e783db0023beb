"""Apply the scale of an attention to its queries instead of its scores, and fold it into the weights of the queries.

onnxruntime's kernels for the products of a single row require a scale of 1, and `full_score_attention.py` uses these
kernels.

MultiHeadAttention over given keys and values would be faster too, but is not changed. The products of a single row
sum the last columns in another order than the rest. So the last bits of a row's result would depend on the length of
its neighbours' context. GroupQueryAttention reads the length of each row alone. Figures:
docs/design/kernels.md#the-scale-of-attention.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, derived_tensor, is_bias, is_float_weight, only_user
from tformer_export.passes.column_blocks import find_column_block, is_read_alone


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
    """Scale the weight and the bias of the projection that computes a value; return False if others read the weight.

    The value may be some of the columns of a projection, if nothing else reads these columns.
    """
    if only_user(query) is None:
        return False
    block = find_column_block(query)
    result, factors = query, np.array(scale, np.float32)
    if block is not None and block.source is not query:
        whole = find_column_block(block.source)
        if whole is None or not is_read_alone(block, query):
            return False
        result, factors = block.source, np.ones(whole.stop, np.float32)
        factors[block.start : block.stop] = scale
    projection = _projection(result)
    if projection is None:
        return False
    weight, bias = projection
    _scale(weight, factors)
    if bias is not None:
        # The scaled bias is a new constant because other nodes may read the bias, such as one of zeros.
        bias_sum = result.producer()
        assert bias_sum is not None
        assert bias.const_value is not None
        scaled = constant(model, f"{result.name}.bias", bias.const_value.numpy() * factors)
        bias_sum.replace_input_with(bias_sum.inputs.index(bias), scaled)
    return True


def _projection(result: ir.Value) -> tuple[ir.Value, ir.Value | None] | None:
    """Return the weight of the projection that computes a value, and its bias, if it has one.

    Return None if the value is not a result of a projection, or if other nodes read the weight or the product.
    """
    node, bias = result.producer(), None
    if node is not None and node.op_type == "Add" and not node.domain:
        bias = next((value for value in node.inputs if is_float_weight(value, 1)), None)
        product = next((value for value in node.inputs if value is not bias), None)
        node = product.producer() if product is not None and bias is not None and only_user(product) else None
    if node is None or node.op_type != "MatMul" or node.domain:
        return None
    weight = node.inputs[1]
    if weight is None or weight.const_value is None or not is_float_weight(weight, 2) or only_user(weight) is None:
        return None
    if bias is not None and not is_bias(bias, weight.const_value):
        return None
    return weight, bias


def _scale(value: ir.Value, factors: np.ndarray) -> None:
    """Multiply the columns of a weight by their factors, or by one number."""
    weight = value.const_value
    assert weight is not None
    value.const_value = derived_tensor(weight, lambda array: array * factors, name=weight.name)


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
