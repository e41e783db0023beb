"""Quantised products: found by their record, after all operators between a float input and the result are compared.

`format.stored_forms` has the operators. A product with any difference to its record is left as the graph has it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import F32
from tformer_runtime.format.onnx_graph import Graph, Node, Tensor, tensor_array
from tformer_runtime.format.stored_forms import (
    TO_FLOAT_PRODUCT,
    ProductSpec,
    RowScaling,
    StoredProducts,
    product_of,
)
from tformer_runtime.rewriting.stored_weights import Comparison, StoredWeights

CONTRIB = "com.microsoft"


class QuantizedProduct(Struct, frozen=True):
    """A product that one operator can compute.

    source, result: names of its float input (…, K) and output (…, N).
    column_first: whether sums are multiplied by the column's scale before the row's; with a fixed scale, whether
        `scale` contains it.
    scale, bias: float32 (N,).
    last: the node that computes the result.
    """

    source: str
    result: str
    scaling: RowScaling
    column_first: bool
    weights: StoredWeights
    scale: F32
    bias: F32 | None
    last: Node


class Readers:
    """The nodes of a graph that read each value; also how many nodes in branches do."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[str, list[Node]] = {}
        self.outside = set(graph.outputs)
        for node in graph.nodes:
            for name in node.inputs:
                self.nodes.setdefault(name, []).append(node)
            for branch in node.branches.values():
                self.outside |= branch.names_read()

    def only_reader(self, name: str) -> Node | None:
        """Return the node that alone reads a value; None if several do, or if it is an output."""
        nodes = self.nodes.get(name, [])
        return nodes[0] if len(nodes) == 1 and name not in self.outside else None


def find_product(graph: Graph, node: Node, stored: StoredProducts, comparison: Comparison) -> QuantizedProduct | None:
    """Return the product whose integers a node multiplies; None if it has no record, or is not as its record says."""
    spec = stored.products.get(node.outputs[0])
    last = graph.producers.get(spec.result) if spec is not None else None
    if spec is None or spec.scaling is None or last is None:
        return None
    zero, fixed_scale = spec.scaling.zero, spec.scaling.fixed_scale
    if fixed_scale and spec.scaling != RowScaling(False, 0.0, 0.0, zero, fixed_scale=fixed_scale):
        return None
    if spec.scaling.magnitude and spec.scaling.floor:  # kernels have a floor for maxima of x alone
        return None
    weights = comparison.find_columns(graph, node.inputs[1], stored.matrices[spec.matrix])
    constants = _constants(graph, spec)
    if weights is None or constants is None:
        return None
    to_float = node.op_type == TO_FLOAT_PRODUCT
    expression = product_of(spec.scaling, weights.spec.inner, to_float, "bias" in constants)
    values: dict[str, str | Tensor] = {"source": spec.source, "columns": node.inputs[1], **constants}
    if not comparison.equals(graph, spec.result, expression, values):
        return None
    arrays = {}
    for key, tensor in constants.items():
        array = tensor_array(tensor, comparison.files.read)
        if tensor.dtype != np.float32 or tensor.shape != (weights.spec.columns,) or array is None:
            return None
        arrays[key] = np.ascontiguousarray(array)
    scale = arrays["scale"]
    if to_float and fixed_scale:
        scale = scale * np.float32(fixed_scale)
    return QuantizedProduct(spec.source, spec.result, spec.scaling, to_float, weights, scale, arrays.get("bias"), last)


def _constants(graph: Graph, spec: ProductSpec) -> dict[str, Tensor] | None:
    """Return the scales of columns and the bias, if the product has one; None if the graph lacks one of them."""
    names = {"scale": spec.scale} | ({"bias": spec.bias} if spec.bias is not None else {})
    found = {key: tensor for key, name in names.items() if (tensor := graph.find_tensor(name)) is not None}
    return found if found.keys() == names.keys() else None
