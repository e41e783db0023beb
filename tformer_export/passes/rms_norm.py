"""x / √(mean(x²) + ε) · w, written out, as one RMSNormalization (Zhang and Sennrich 2019), a standard operator.

At d = 768, one thread: 2.8 µs for one row where the seven operators take 5.2, and 44 for 256 rows where they take 147.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant


def run(model: ir.Model) -> int:
    fused = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            fused += node.op_type == "Sqrt" and _fuse(model, graph, node)
    return fused


def _fuse(model: ir.Model, graph: ir.Graph, root: ir.Node) -> bool:
    found = _mean_square(root)
    if found is None:
        return False
    value, epsilon = found
    normal = _divided(value, root)
    if normal is None:
        return False
    last, scale = _scaled(normal)
    if scale is None:
        width = value.shape[-1] if value.shape is not None else None
        if not isinstance(width, int):
            return False
        scale = np.ones(width, np.float32)
    name = f"{last.outputs[0].name}.scale"
    held = constant(model, name, scale)
    made = ir.node("RMSNormalization", [value, held], {"axis": -1, "epsilon": epsilon}, name=f"{last.name}.norm")
    result, norm = last.outputs[0], made.outputs[0]
    norm.shape, norm.type = result.shape, result.type
    graph.insert_before(last, made)
    result.replace_all_uses_with(norm, replace_graph_outputs=True)
    norm.name, result.name = result.name, f"{result.name}.written.out"  # which may be the name of a graph's output
    return True


def _mean_square(root: ir.Node) -> tuple[ir.Value, float] | None:
    """x and ε of √(mean(x², -1) + ε)."""
    total = _producer(root.inputs[0], "Add")
    if total is None:
        return None
    sides = [(one, other) for one, other in (total.inputs, total.inputs[::-1]) if _number(other) is not None]
    mean = _producer(sides[0][0], "ReduceMean") if sides else None
    if mean is None or len(mean.inputs) < 2:
        return None
    axes, keep = _held(mean.inputs[1]), mean.attributes.get("keepdims")
    if axes is None or axes.tolist() != [-1] or (keep is not None and keep.as_int() != 1):
        return None
    square = _producer(mean.inputs[0], "Pow", "Mul")
    if square is None:
        return None
    value, by = square.inputs
    squared = by is value if square.op_type == "Mul" else _number(by) == 2
    floats = value is not None and value.dtype in (None, ir.DataType.FLOAT)
    return (value, float(_number(sides[0][1]) or 0.0)) if squared and floats and value is not None else None


def _divided(value: ir.Value, root: ir.Node) -> ir.Node | None:
    """What divides x by the root, if nothing else reads that."""
    divisor = root.outputs[0]
    user = _only_user(divisor)
    if user is not None and user.op_type == "Reciprocal":
        divisor = user.outputs[0]
        user = _only_user(divisor)
        return user if user is not None and user.op_type == "Mul" and {*user.inputs} == {value, divisor} else None
    if user is not None and user.op_type == "Div" and list(user.inputs) == [value, divisor]:
        return user
    return None


def _scaled(normal: ir.Node) -> tuple[ir.Node, np.ndarray | None]:
    """The product with a weight for each entry, and that weight; the node itself and None if there is none."""
    user = _only_user(normal.outputs[0])
    if user is not None and user.op_type == "Mul":
        for value in user.inputs:
            held = _held(value)
            if held is not None and held.size > 1 and held.size == held.shape[-1] and held.dtype == np.float32:
                return user, held.reshape(-1)
    return normal, None


def _producer(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in kinds and not node.domain else None


def _only_user(value: ir.Value) -> ir.Node | None:
    users = list(value.uses())
    return users[0].node if len(users) == 1 and not value.is_graph_output() else None


def _held(value: ir.Value | None) -> np.ndarray | None:
    return value.const_value.numpy() if value is not None and value.const_value is not None else None


def _number(value: ir.Value | None) -> float | None:
    held = _held(value)
    return float(held.reshape(-1)[0]) if held is not None and held.size == 1 else None
