"""Remove reshapes that do nothing: one after another, or to the shape that the value already has.

The head splits around an attention operator that takes merged heads cancel out in this way. Between them torch.onnx may
leave an Identity, where two transpositions have cancelled out.
"""

from __future__ import annotations

import onnx_ir as ir


def run(model: ir.Model) -> int:
    """Remove the reshapes in place, and return how many there were. Linear in the number of nodes."""
    removed = 0
    for node in list(model.graph.all_nodes()):
        source = node.inputs[0] if node.op_type == "Identity" else None
        if source is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Reshape":
            continue
        source = node.inputs[0]
        inner = source.producer() if source is not None else None
        if inner is not None and inner.op_type == "Reshape" and _same_meaning(node):
            node.replace_input_with(0, inner.inputs[0])
            removed += 1
        source, result = node.inputs[0], node.outputs[0]
        if source is not None and _same_shape(source, result) and not result.is_graph_output():
            result.replace_all_uses_with(source)
            removed += 1
    return removed


def _same_meaning(node: ir.Node) -> bool:
    """Return whether the target shape is independent of the reshaped value. A 0 in it would copy a size."""
    zero = node.attributes.get("allowzero")
    shape = node.inputs[1].const_value if node.inputs[1] is not None else None
    return (zero is not None and zero.as_int() == 1) or (shape is not None and 0 not in shape.numpy())


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Return whether both shapes are known to have equal sizes, by number or by the name of a traced symbol."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    return all(_known(a) and a == b for a, b in zip(one.shape, other.shape, strict=True))


def _known(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) or size.value is not None
