"""Divide the channels of products' inputs and multiply the rows of their weights: equal products, other ranges.

Source: SmoothQuant, Xiao et al. 2022, https://arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, derived_tensor
from tformer_export.quantize.matrices import Matrix

# Norms whose last step is a multiplication with their weight and the addition of their bias
NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


def is_possible(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix]) -> bool:
    """Return whether the matrices are multiplied with this value and read for nothing else, so that they may change."""
    products = {name for matrix in matrices for name in matrix.products}
    stored = [model.graph.initializers[name] for matrix in matrices for name in matrix.initializers]
    readers = [use.node for initializer in stored for use in initializer.uses()]
    readers += [use.node for node in readers if node.op_type == "Transpose" for use in node.outputs[0].uses()]
    only_products = all(node.name in products or node.op_type == "Transpose" for node in readers)
    return only_products and all(not matrix.is_table and set(matrix.inputs) == {value} for matrix in matrices)


def is_free(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix]) -> bool:
    """Return whether only these products read the result of a norm, so that dividing it costs nothing."""
    node, products = value.producer(), {name for matrix in matrices for name in matrix.products}
    if node is None or node.op_type not in NORMS or value is not node.outputs[0] or value.is_graph_output():
        return False
    constants = all(parameter is not None and parameter.const_value is not None for parameter in node.inputs[1:3])
    only_products = all(use.idx == 0 and use.node.name in products for use in value.uses())
    return constants and only_products and is_possible(model, value, matrices)


def divide(model: ir.Model, value: ir.Value, matrices: Sequence[Matrix], factors: np.ndarray) -> None:
    """Divide a value by factors (K,) and multiply the matrices by them, in place.

    The division is part of the norm where that is free, else one Mul.
    """
    if is_free(model, value, matrices):
        node = value.producer()
        assert node is not None
        for i, parameter in enumerate(node.inputs[1:3], 1):
            assert parameter is not None
            assert parameter.const_value is not None
            divided = (parameter.const_value.numpy() / factors).astype(np.float32)
            node.replace_input_with(i, constant(model, f"{value.name}.divided.{i}", divided))
    else:
        _insert_division(model, value, {name for matrix in matrices for name in matrix.products}, factors)
    for matrix in matrices:
        for name, is_transposed in matrix.initializers.items():
            _multiply(model.graph.initializers[name], factors if is_transposed else factors[:, None])


def _insert_division(model: ir.Model, value: ir.Value, products: set[str], factors: np.ndarray) -> None:
    """Divide the value in each graph before the first of its products there."""
    inverse = constant(model, f"{value.name}.inverse", (1 / factors).astype(np.float32))
    divided_values: dict[int, ir.Value] = {}
    readers = [use.node for use in value.uses() if use.node.name in products]
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            if node not in readers:
                continue
            if id(graph) not in divided_values:
                division = ir.node("Mul", [value, inverse], name=f"{value.name}.divided")
                division.outputs[0].name = f"{value.name}.divided"
                division.outputs[0].shape, division.outputs[0].dtype = value.shape, ir.DataType.FLOAT
                graph.insert_before(node, division)
                divided_values[id(graph)] = division.outputs[0]
            node.replace_input_with(0, divided_values[id(graph)])


def _multiply(weight: ir.Value, factors: np.ndarray) -> None:
    """Multiply a weight by float32 factors whenever it is read, so that memory holds it once."""
    values = weight.const_value
    assert values is not None
    weight.const_value = derived_tensor(values, lambda array: array * factors, name=str(weight.name))
