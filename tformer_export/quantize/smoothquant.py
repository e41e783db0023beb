"""Divide the channels of what products read, and multiply the rows of their weights: equal products, other ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.quantize.matrices import Matrix

NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")  # which end with gain and bias


def is_possible(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix]) -> bool:
    """Whether the matrices are multiplied with this value and read for nothing else, so that they may change."""
    products = {name for matrix in matrices for name in matrix.products}
    held = [model.graph.initializers[name] for matrix in matrices for name in matrix.held]
    readers = [use.node for one in held for use in one.uses()]
    readers += [use.node for node in readers if node.op_type == "Transpose" for use in node.outputs[0].uses()]
    alone = all(node.name in products or node.op_type == "Transpose" for node in readers)
    return alone and all(not matrix.is_table and set(matrix.inputs) == {value} for matrix in matrices)


def is_free(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix]) -> bool:
    """Whether a value is a norm's result, that is read by these products alone."""
    node, products = value.producer(), {name for matrix in matrices for name in matrix.products}
    if node is None or node.op_type not in NORMS or value is not node.outputs[0] or value.is_graph_output():
        return False
    constants = all(held is not None and held.const_value is not None for held in node.inputs[1:3])
    alone = all(use.idx == 0 and use.node.name in products for use in value.uses())
    return constants and alone and is_possible(model, value, matrices)


def divide(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix], factors: np.ndarray) -> None:
    """Divide by factors (K,): in the norm that the value is of, where that is free, else by one Mul in the model."""
    if is_free(model, value, matrices):
        node = value.producer()
        assert node is not None
        for i, held in enumerate(node.inputs[1:3], 1):
            assert held is not None
            assert held.const_value is not None
            divided = (held.const_value.numpy() / factors).astype(np.float32)
            node.replace_input_with(i, constant(model, f"{value.name}.divided.{i}", divided))
    else:
        _insert(model, value, {name for matrix in matrices for name in matrix.products}, factors)
    for matrix in matrices:
        for name, turned in matrix.held.items():
            _multiply(model.graph.initializers[name], factors if turned else factors[:, None])


def _insert(model: ir.Model, value: ir.Value, products: set[str], factors: np.ndarray) -> None:
    """Before the products of each graph that read the value."""
    inverse = constant(model, f"{value.name}.inverse", (1 / factors).astype(np.float32))
    made: dict[int, ir.Value] = {}
    readers = [use.node for use in value.uses() if use.node.name in products]
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if node not in readers:
                continue
            if id(graph) not in made:
                divided = ir.node("Mul", [value, inverse], name=f"{value.name}.divided")
                divided.outputs[0].name = f"{value.name}.divided"
                divided.outputs[0].shape, divided.outputs[0].dtype = value.shape, ir.DataType.FLOAT
                graph.insert_before(node, divided)
                made[id(graph)] = divided.outputs[0]
            node.replace_input_with(0, made[id(graph)])


def _multiply(held: ir.Value, factors: np.ndarray) -> None:
    """A weight, whenever it is asked for: so that it is not held twice."""
    before = held.const_value
    assert before is not None
    shape = ir.Shape(size for size in before.shape if isinstance(size, int))  # all of them are
    held.const_value = ir.LazyTensor(
        lambda: ir.tensor(before.numpy() * factors), before.dtype, shape, name=str(held.name)
    )
