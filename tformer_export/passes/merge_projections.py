"""Projections of one value as one product: queries, keys and values, or the two halves of a gated layer.

One product of the concatenated weights starts one kernel where there were several, which a step of few rows notices.
Where an attention operator takes queries, keys and values packed, not even the split is left.

Times as long with a product each, medians of ratios by turns ± half the distance of their quartiles, of requests that
read 32 tokens and decode 32; d = 512, 8000 ids, one thread of a Xeon with AVX-512 and AMX on which others were at work:

==============================  ===========  ===========  ===========
rows                            1            8            32
==============================  ===========  ===========  ===========
encoder-decoder, 6+6, float32   1.02 ± 0.02  1.00 ± 0.01  0.99 ± 0.04
encoder-decoder, 6+6, int8      1.03 ± 0.13  1.10 ± 0.09  1.30 ± 0.03
decoder-only, 6, float32        0.97 ± 0.07  1.00 ± 0.02  0.96 ± 0.04
decoder-only, 6, int8           1.14 ± 0.04  1.00 ± 0.04  0.94 ± 0.04
==============================  ===========  ===========  ===========

So with floats it is all one there, and with int8 it gains where activations are rounded once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

MOST = 4  # of one value; a step has no more, and an encoder's many cross projections gain nothing


@dataclass
class _Projection:
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
        return _sizes(self.weight)[1]

    def offset(self) -> np.ndarray:
        if self.bias is None:
            return np.zeros(self.width, np.float32)
        held = next(v.const_value for v in self.bias.inputs if v is not None and v.const_value is not None)
        return np.broadcast_to(held.numpy(), self.width)


def run(model: ir.Model) -> int:
    merged = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        groups: dict[ir.Value, list[_Projection]] = defaultdict(list)
        for node in graph:
            projection = _projection(node)
            if projection is not None:
                groups[node.inputs[0]].append(projection)  # type: ignore[index]
        for source, group in groups.items():
            if 1 < len(group) <= MOST:
                _merge(model, graph, source, group)
                merged += len(group) - 1
    return merged


def _projection(node: ir.Node) -> _Projection | None:
    if node.op_type != "MatMul" or node.domain or node.inputs[0] is None or not _is_weight(node.inputs[1], 2):
        return None
    users = list(node.outputs[0].uses())
    if node.outputs[0].is_graph_output():
        return _Projection(node, None)
    if len(users) == 1 and users[0].node.op_type == "Add" and any(_is_weight(v, 1) for v in users[0].node.inputs):
        return _Projection(node, users[0].node)
    return _Projection(node, None)


def _is_weight(value: ir.Value | None, rank: int) -> bool:
    held = value.const_value if value is not None else None
    return held is not None and len(held.shape) == rank and held.dtype == ir.DataType.FLOAT


def _merge(model: ir.Model, graph: ir.Graph, source: ir.Value, group: list[_Projection]) -> None:
    first = group[0].product
    name = first.outputs[0].name
    weights = [p.weight for p in group]
    widths = [p.width for p in group]
    together = ir.LazyTensor(  # held only while it is written
        lambda: ir.tensor(np.concatenate([w.numpy() for w in weights], 1)),
        ir.DataType.FLOAT,
        ir.Shape([_sizes(weights[0])[0], sum(widths)]),
        name=f"{name}.weights",
    )
    weight = _constant(model, together)
    packed = ir.node("MatMul", [source, weight], name=f"{name}.merged")
    made = [packed]
    if any(p.bias for p in group):
        bias = _constant(model, ir.tensor(np.concatenate([p.offset() for p in group]), name=f"{name}.biases"))
        made.append(ir.node("Add", [packed.outputs[0], bias], name=f"{name}.merged.bias"))
    result = made[-1].outputs[0]
    for i, node in enumerate(made):
        node.outputs[0].name = f"{name}.merged.{i}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    attention = _packed_attention(group)
    if attention is not None:
        attention.replace_input_with(0, result)
        attention.replace_input_with(1, None)
        attention.replace_input_with(2, None)
    else:
        sizes = _constant(model, ir.tensor(np.array(widths, np.int64), name=f"{name}.widths"))
        split = ir.node("Split", [result, sizes], {"axis": -1}, num_outputs=len(group), name=f"{name}.split")
        for part, projection in zip(split.outputs, group, strict=True):
            held = projection.result.name
            projection.result.name, part.name = f"{held}.alone", held  # which may be the name of a graph's output
            part.dtype, part.shape = ir.DataType.FLOAT, projection.result.shape
            projection.result.replace_all_uses_with(part, replace_graph_outputs=True)
        made.append(split)
    graph.insert_before(first, made)
    for projection in group:
        for node in filter(None, (projection.bias, projection.product)):
            graph.remove(node, safe=True)


def _packed_attention(group: list[_Projection]) -> ir.Node | None:
    """The GroupQueryAttention whose query, key and value these are, in this order, and nothing else's."""
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


def _sizes(held: ir.TensorProtocol) -> list[int]:
    return [size for size in held.shape if isinstance(size, int)]  # of a weight, all are known


def _constant(model: ir.Model, held: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(name=held.name, const_value=held, shape=ir.Shape(_sizes(held)), type=ir.TensorType(held.dtype))
    model.graph.initializers[str(held.name)] = value
    return value
