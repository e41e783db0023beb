"""Replace x / √(mean(x²) + ε) · w by RMSNormalization (Zhang and Sennrich 2019), a standard operator.

It is faster than the operators that it replaces: docs/design/kernels.md#norms-and-sums.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, only_user, replace_node


def run(model: ir.Model) -> int:
    """Replace the norms in place, and return how many there were.

    Nodes that nothing reads any more stay in the graph.
    """
    fused = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            fused += node.op_type == "Sqrt" and _replace_norm(model, node)
    return fused


def _replace_norm(model: ir.Model, root: ir.Node) -> bool:
    """Replace the norm that contains this square root; return False if it is no such norm."""
    mean_square = _mean_square(root)
    if mean_square is None:
        return False
    value, epsilon = mean_square
    division = _division(value, root)
    if division is None:
        return False
    last, weight_values = _weighted(division)
    if weight_values is None:
        width = value.shape[-1] if value.shape is not None else None
        if not isinstance(width, int):
            return False
        weight_values = np.ones(width, np.float32)
    name = f"{last.outputs[0].name}.scale"
    weight = constant(model, name, weight_values)
    attributes = {"axis": -1, "epsilon": epsilon}
    replace_node(last, [ir.node("RMSNormalization", [value, weight], attributes, name=f"{last.name}.norm")])
    return True


def _mean_square(root: ir.Node) -> tuple[ir.Value, float] | None:
    """Return x and ε of √(mean(x², -1) + ε)."""
    total = _producer(root.inputs[0], "Add")
    if total is None:
        return None
    sides = [(one, other) for one, other in (total.inputs, total.inputs[::-1]) if _number(other) is not None]
    mean = _producer(sides[0][0], "ReduceMean") if sides else None
    if mean is None or len(mean.inputs) < 2:
        return None
    axes, keeps_dims = _constant_of(mean.inputs[1]), mean.attributes.get("keepdims")
    if axes is None or axes.tolist() != [-1] or (keeps_dims is not None and keeps_dims.as_int() != 1):
        return None
    square = _producer(mean.inputs[0], "Pow", "Mul")
    if square is None:
        return None
    value, exponent = square.inputs
    is_square = exponent is value if square.op_type == "Mul" else _number(exponent) == 2
    is_float = value is not None and value.dtype in (None, ir.DataType.FLOAT)
    return (value, float(_number(sides[0][1]) or 0.0)) if is_square and is_float and value is not None else None


def _division(value: ir.Value, root: ir.Node) -> ir.Node | None:
    """Return the node that divides x by the root, if nothing else reads the root."""
    divisor = root.outputs[0]
    user = only_user(divisor)
    if user is not None and user.op_type == "Reciprocal":
        divisor = user.outputs[0]
        user = only_user(divisor)
        return user if user is not None and user.op_type == "Mul" and {*user.inputs} == {value, divisor} else None
    if user is not None and user.op_type == "Div" and list(user.inputs) == [value, divisor]:
        return user
    return None


def _weighted(division: ir.Node) -> tuple[ir.Node, np.ndarray | None]:
    """Return the product of the norm with its weight, and the weight; without a weight the norm itself and None."""
    user = only_user(division.outputs[0])
    if user is not None and user.op_type == "Mul":
        for value in user.inputs:
            weight = _constant_of(value)
            if weight is not None and weight.size == weight.shape[-1] > 1 and weight.dtype == np.float32:
                return user, weight.reshape(-1)
    return division, None


def _producer(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in kinds and not node.domain else None


def _constant_of(value: ir.Value | None) -> np.ndarray | None:
    return value.const_value.numpy() if value is not None and value.const_value is not None else None


def _number(value: ir.Value | None) -> float | None:
    array = _constant_of(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
