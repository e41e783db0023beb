"""Merge the projections of one value into one product: queries, keys and values, or the halves of a gated layer.

One product of the concatenated weights starts one kernel in the place of several, which makes steps of few rows faster.
Where an attention operator takes packed queries, keys and values, not even a split remains. It gains most with int8,
because activations are rounded once for all projections. Figures: docs/design/kernels.md#projections-of-one-value.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import add_constant, is_bias, is_float_weight, only_user, replace_value, weight_sizes

# A step has no more projections of one value. The many cross projections of an encoder gain nothing.
MAX_MERGED_PROJECTIONS = 4


@dataclass
class _Projection:
    """A product with a constant weight, and the node that adds its bias, if there is one."""

    product: ir.Node
    bias: ir.Node | None

    @property
    def result(self) -> ir.Value:
        return (self.bias or self.product).outputs[0]

    @property
    def weight(self) -> ir.TensorProtocol:
        value = self.product.inputs[1]
        assert value is not None
        assert value.const_value is not None
        return value.const_value

    @property
    def width(self) -> int:
        return weight_sizes(self.weight)[1]

    def bias_values(self) -> np.ndarray:
        """Return the bias (width,), zeros if there is none."""
        if self.bias is None:
            return np.zeros(self.width, np.float32)
        tensor = next(v.const_value for v in self.bias.inputs if v is not None and v.const_value is not None)
        return np.broadcast_to(tensor.numpy(), self.width)


def run(model: ir.Model) -> int:
    """Merge projections in place, and return how many products disappeared. Linear in the number of nodes."""
    merged = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        groups: dict[ir.Value, list[_Projection]] = defaultdict(list)
        for node in graph:
            projection = _projection(node)
            if projection is not None:
                groups[node.inputs[0]].append(projection)  # type: ignore[index]
        for group in groups.values():
            if 1 < len(group) <= MAX_MERGED_PROJECTIONS:
                _merge(model, graph, group)
                merged += len(group) - 1
    return merged


def _projection(node: ir.Node) -> _Projection | None:
    if node.op_type != "MatMul" or node.domain or node.inputs[0] is None or not is_float_weight(node.inputs[1], 2):
        return None
    projection, user = _Projection(node, None), only_user(node.outputs[0])
    if user is not None and user.op_type == "Add" and any(is_bias(v, projection.weight) for v in user.inputs):
        projection.bias = user
    return projection


def _merge(model: ir.Model, graph: ir.Graph, group: list[_Projection]) -> None:
    """Replace projections of one value by one product, and split its result where no attention takes it packed."""
    first = group[0].product
    source = first.inputs[0]  # read here: the merge of another group may have replaced the value of this one
    assert source is not None
    name = str(first.outputs[0].name)
    new_nodes = _merged_product(model, source, group, name)
    result = new_nodes[-1].outputs[0]
    attention = _packed_attention(group)
    if attention is not None:
        attention.replace_input_with(0, result)
        attention.replace_input_with(1, None)
        attention.replace_input_with(2, None)
    else:
        widths = np.array([projection.width for projection in group], np.int64)
        sizes = add_constant(model, ir.tensor(widths, name=f"{name}.widths"))
        split = ir.node("Split", [result, sizes], {"axis": -1}, num_outputs=len(group), name=f"{name}.split")
        for part, projection in zip(split.outputs, group, strict=True):
            part.dtype = ir.DataType.FLOAT
            replace_value(projection.result, part)
        new_nodes.append(split)
    graph.insert_before(first, new_nodes)
    for projection in group:
        for node in filter(None, (projection.bias, projection.product)):
            graph.remove(node, safe=True)


def _merged_product(model: ir.Model, source: ir.Value, group: list[_Projection], name: str) -> list[ir.Node]:
    """Return the product of a value with the concatenated weights, and the sum with the biases if there are any."""
    weights = [projection.weight for projection in group]
    concatenated = ir.LazyTensor(  # computed when the file is written, so that memory holds no second copy
        lambda: ir.tensor(np.concatenate([weight.numpy() for weight in weights], 1)),
        ir.DataType.FLOAT,
        ir.Shape([weight_sizes(weights[0])[0], sum(projection.width for projection in group)]),
        name=f"{name}.weights",
    )
    new_nodes = [ir.node("MatMul", [source, add_constant(model, concatenated)], name=f"{name}.merged")]
    if any(projection.bias for projection in group):
        biases = np.concatenate([projection.bias_values() for projection in group])
        bias = add_constant(model, ir.tensor(biases, name=f"{name}.biases"))
        new_nodes.append(ir.node("Add", [new_nodes[0].outputs[0], bias], name=f"{name}.merged.bias"))
    for i, node in enumerate(new_nodes):
        node.outputs[0].name = f"{name}.merged.{i}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    return new_nodes


def _packed_attention(group: list[_Projection]) -> ir.Node | None:
    """Return the GroupQueryAttention whose query, key and value are these projections, in this order; None otherwise.

    No other node may read the projections.
    """
    if len(group) != 3:
        return None
    users = [list(p.result.uses()) for p in group]
    if any(len(u) != 1 for u in users) or any(p.result.is_graph_output() for p in group):
        return None
    nodes = {u[0].node for u in users}
    if len(nodes) != 1 or [u[0].idx for u in users] != [0, 1, 2]:
        return None
    (node,) = nodes
    return node if node.op_type == "GroupQueryAttention" else None
