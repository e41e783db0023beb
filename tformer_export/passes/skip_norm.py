"""Join a norm with the residual sum before it, and with the bias in that sum: one kernel on CUDA instead of three.

The operators are onnxruntime's SkipLayerNormalization and SkipSimplifiedLayerNormalization. Their second result is the
sum, which the next residual reads. onnxruntime itself joins them only where sequences have a fixed length.
"""

from __future__ import annotations

import onnx_ir as ir

from tformer_export.common.ir_edit import is_float_weight, only_user, replace_value
from tformer_export.passes.transposed_matmul import CONTRIB

OPERATORS = {"LayerNormalization": "SkipLayerNormalization", "RMSNormalization": "SkipSimplifiedLayerNormalization"}
EPSILON = 1e-5  # the default of both norms
RANK = 3  # of the sums that the operators take: (batch, positions, width)


def run(model: ir.Model) -> int:
    """Join the norms with their sums in place, and return how many there were. Cost: one pass over the nodes."""
    joined = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            joined += node.op_type in OPERATORS and not node.domain and _join(graph, node)
    if joined:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return joined


def _join(graph: ir.Graph, norm: ir.Node) -> bool:
    """Join a norm with the sum before it; return False if there is no such sum."""
    total = norm.inputs[0]
    residual_sum = total.producer() if total is not None else None
    if total is None or residual_sum is None or residual_sum.op_type != "Add" or residual_sum.graph is not graph:
        return False
    axis, stash = norm.attributes.get("axis"), norm.attributes.get("stash_type")
    is_last = axis is None or axis.as_int() in (-1, RANK - 1)
    weights = norm.inputs[1:]
    if not is_last or (stash is not None and stash.as_int() != 1) or len(norm.outputs) > 1:
        return False
    if not _have_one_shape(residual_sum) or not all(_is_vector_of(weight, total) for weight in weights):
        return False
    branch, skip, bias, bias_sum = _split_bias(residual_sum)
    epsilon = norm.attributes.get("epsilon")
    inputs = [branch, skip, *weights, *([None] * (norm.op_type == "LayerNormalization" and len(weights) == 1)), bias]
    has_other_readers = only_user(total) is None
    joined = ir.node(
        OPERATORS[norm.op_type],
        inputs,
        {"epsilon": epsilon.as_float() if epsilon is not None else EPSILON},
        domain=CONTRIB,
        version=1,
        num_outputs=4 if has_other_readers else 1,
        name=f"{norm.name}.joined",
    )
    for unused in joined.outputs[1:3]:  # the mean and the deviation, for training
        unused.name = ""
    graph.insert_after(residual_sum, joined)  # other readers of the sum may come before the norm
    replace_value(norm.outputs[0], joined.outputs[0])
    graph.remove(norm, safe=True)
    if has_other_readers:
        replace_value(total, joined.outputs[3])
    graph.remove(residual_sum, safe=True)
    if bias_sum is not None:
        graph.remove(bias_sum, safe=True)
    return True


def _have_one_shape(residual_sum: ir.Node) -> bool:
    """Return whether both summands are results of this rank and of the same shape: the operators repeat no rows."""
    shapes = []
    for value in residual_sum.inputs:
        if value is None or value.const_value is not None or value.dtype != ir.DataType.FLOAT:
            return False
        shapes.append(_sizes(value))
    return shapes[0] == shapes[1] and len(shapes[0]) == RANK and None not in shapes[0]


def _sizes(value: ir.Value) -> list[int | str | None]:
    """Return the sizes of a value as numbers and names; an empty list for an unknown shape."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def _is_vector_of(weight: ir.Value | None, value: ir.Value) -> bool:
    """Return whether a weight has a number for each feature of a value: the operators repeat no single number."""
    tensor = weight.const_value if weight is not None and is_float_weight(weight, 1) else None
    return tensor is not None and list(tensor.shape) == _sizes(value)[-1:]


def _split_bias(
    residual_sum: ir.Node,
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None, ir.Node | None]:
    """Return the summands with the bias of one of them apart: branch, skip, bias, and the sum that adds the bias."""
    one, other = residual_sum.inputs
    for branch, skip in ((one, other), (other, one)):
        biased = branch.producer() if branch is not None else None
        if branch is not None and biased is not None and biased.op_type == "Add" and only_user(branch) is not None:
            for value, bias in (biased.inputs, biased.inputs[::-1]):
                if value is not None and _sizes(value) == _sizes(branch) and _is_vector_of(bias, branch):
                    return value, skip, bias, biased
    return one, other, None, None
