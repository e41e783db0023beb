"""Compute products of flattened rows on the rows as they were before.

    Reshape (…, K) to (rows, K) → products with matrices, biases, activations → Reshape (rows, N) to (…, N)

becomes the same operators between (…, K) and (…, N), with MatMul and Add in the place of Gemm. Layers that call
`torch.addmm` are written like this. Other passes, the quantisation and the runtime then find the operators of
`torch.nn.Linear`: docs/design/kernels.md#other-ways-to-write-a-layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import (
    add_constant,
    constant,
    is_float_weight,
    only_user,
    replace_node,
    replace_value,
    transposed_weight,
    weight_sizes,
)

_ACTIVATIONS = {"Abs", "Elu", "Erf", "Gelu", "Identity", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Softplus", "Tanh"}
_PRODUCTS = {"MatMul", "Gemm"}
_PLAIN_GEMM = {"alpha": 1.0, "beta": 1.0, "transA": 0}
_MAX_OPERATORS = 16  # between the reshapes


@dataclass
class _RowOperators:
    """Operators between two reshapes, in their order. Each of them computes every row on its own.

    source: the value of which the flattened rows are a reshape. It may have its last axes apart, such as heads.
    last: the reshape of the result.
    """

    source: ir.Value
    nodes: list[ir.Node]
    last: ir.Node


def run(model: ir.Model) -> int:
    """Replace them in place, and return how many products there were. Linear in the number of nodes.

    Nodes that nothing reads any more stay in the graph.
    """
    count = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            found = _operators_before(node) if node.op_type == "Reshape" and not node.domain else None
            if found is not None:
                _unflatten(model, found)
                count += sum(one.op_type in _PRODUCTS for one in found.nodes)
    return count


def _operators_before(last: ir.Node) -> _RowOperators | None:
    """Return the operators on flattened rows whose result a node reshapes back; None if there are none."""
    nodes: list[ir.Node] = []
    value = last.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Reshape" and not node.domain:
            if not any(one.op_type in _PRODUCTS for one in nodes):
                return None
            found = [one for one in _before_reshapes(value) if _keep_rows(one, value, last)]
            if not found:
                return None
            rank = len(last.outputs[0].shape or ())
            exact = [one for one in found if len(one.shape or ()) == rank]
            return _RowOperators([*exact, *found][0], nodes, last)
        index = _row_input(node)
        is_outside = node.graph is not last.graph  # a result of another graph may be no output of this one
        if index is None or is_outside or only_user(value) is None or len(nodes) == _MAX_OPERATORS:
            return None
        nodes.insert(0, node)
        value = node.inputs[index]
    return None


def _before_reshapes(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the inputs of the reshapes that compute a value one after another, from the last reshape to the first."""
    node = value.producer()
    while node is not None and node.op_type in ("Reshape", "Identity") and not node.domain:
        if node.inputs[0] is None:
            return
        yield node.inputs[0]
        node = node.inputs[0].producer()


def _keep_rows(source: ir.Value, flat: ir.Value, last: ir.Node) -> bool:
    """Return whether `last` restores the first axes of `source`, and a row of `flat` is one place of these axes.

    The sizes must be known, by number or by the name of a traced symbol. The width of the result follows from them.
    """
    restored = last.outputs[0].shape
    if source.shape is None or flat.shape is None or restored is None or len(flat.shape) != 2:
        return False
    leading, width = len(restored) - 1, flat.shape[-1]
    return (
        0 < leading < len(source.shape)
        and all(isinstance(size, int) or size.value is not None for size in restored[:leading])
        and list(source.shape[:leading]) == list(restored[:leading])
        and isinstance(width, int)
        and _joined_width(source, leading) == width
    )


def _row_input(node: ir.Node) -> int | None:
    """Return the index of the input whose rows a node computes on their own; None for other nodes."""
    if node.domain or len(node.outputs) != 1:
        return None
    if node.op_type in _ACTIVATIONS:
        return 0
    if node.op_type == "MatMul":
        return 0 if _is_matrix(node.inputs[1]) else None
    if node.op_type == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        is_plain = all(
            name not in node.attributes or node.attributes[name].value == value for name, value in _PLAIN_GEMM.items()
        )
        return 0 if is_plain and _is_matrix(node.inputs[1]) and (bias is None or _is_row(bias)) else None
    if node.op_type in ("Add", "Mul"):
        return next((index for index in (0, 1) if _is_row(node.inputs[1 - index])), None)
    return None


def _is_matrix(value: ir.Value | None) -> bool:
    """Return whether a value is a constant matrix, or the transpose of one."""
    return is_float_weight(value, 2) or transposed_weight(value) is not None


def _is_row(value: ir.Value | None) -> bool:
    """Return whether a value is a constant that is added to, or multiplied with, each row in the same way."""
    return is_float_weight(value, 1) or is_float_weight(value, 0)


def _unflatten(model: ir.Model, found: _RowOperators) -> None:
    """Let the operators read the source itself, and the readers of the second reshape their result."""
    shape = found.last.outputs[0].shape
    assert found.source.shape is not None
    assert shape is not None
    leading = list(shape[:-1])
    value = found.source if len(found.source.shape) == len(shape) else _joined(model, found, leading)
    for node in found.nodes:
        index = _row_input(node)
        assert index is not None
        node.replace_input_with(index, value)
        value = _as_matmul(model, node) if node.op_type == "Gemm" else node.outputs[0]
        width = value.shape[-1] if value.shape is not None else None
        value.shape = None if width is None else ir.Shape([*leading, width])
    replace_value(found.last.outputs[0], value)
    assert found.last.graph is not None
    found.last.graph.remove(found.last, safe=True)


def _joined_width(source: ir.Value, leading: int) -> int | None:
    """Return the product of the sizes of all axes but the leading ones; None if one of them is unknown."""
    sizes = list(source.shape or ())[leading:]
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(sizes) else None


def _joined(model: ir.Model, found: _RowOperators, leading: list[int | ir.SymbolicDim]) -> ir.Value:
    """Return the source with its last axes, such as those of heads, as one."""
    width = _joined_width(found.source, len(leading))
    assert width is not None
    target = [*([0] * len(leading)), width]  # 0 copies a size
    name = f"shape.{'.'.join(map(str, target))}"
    first = found.nodes[0]
    reshape = ir.node("Reshape", [found.source, constant(model, name, np.array(target))], name=f"{first.name}.joined")
    result = reshape.outputs[0]
    result.name, result.shape, result.type = f"{reshape.name}.rows", ir.Shape([*leading, width]), found.source.type
    assert first.graph is not None
    first.graph.insert_before(first, reshape)
    return result


def _as_matmul(model: ir.Model, node: ir.Node) -> ir.Value:
    """Replace a Gemm by MatMul, and Add if it has a bias, and return the result."""
    rows, matrix, bias = [*node.inputs, None][:3]
    assert matrix is not None
    flag = node.attributes.get("transB")
    if flag is not None and flag.as_int():
        matrix = transposed_weight(matrix) or _transpose(model, matrix)
    new_nodes = [ir.node("MatMul", [rows, matrix], name=node.name)]
    if bias is not None:
        product = new_nodes[0].outputs[0]
        product.name, product.dtype = f"{node.outputs[0].name}.product", ir.DataType.FLOAT
        new_nodes.append(ir.node("Add", [product, bias], name=f"{node.name}.bias"))
    replace_node(node, new_nodes)
    return new_nodes[-1].outputs[0]


def _transpose(model: ir.Model, matrix: ir.Value) -> ir.Value:
    """Return the transpose of a constant matrix as a constant, computed on each access."""
    weight, name = matrix.const_value, f"{matrix.name}.columns"
    assert weight is not None
    if name not in model.graph.initializers:
        shape = ir.Shape(weight_sizes(weight)[::-1])
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(weight.numpy().T)), ir.DataType.FLOAT, shape, name=name
        )
        add_constant(model, tensor)
    return model.graph.initializers[name]
