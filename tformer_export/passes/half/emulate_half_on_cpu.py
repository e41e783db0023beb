"""Rewrite a model in half precision so that the CPU can run it, for the parity gate where there is no GPU.

Every node that reads or writes half precision computes in float32 between casts. So its result is rounded, or becomes
infinite, as in a CUDA kernel. onnxruntime refuses bfloat16 on the CPU. Around float16 nodes it puts such casts itself,
but it drops the casts between two nodes, so that no intermediate number would be rounded. Casts that are in the file
stay. Inputs and outputs keep their types, and weights are the same numbers in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import derived_tensor, replace_value
from tformer_export.passes import remove_unused

_FLOAT, _HALVES = ir.DataType.FLOAT, (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SUPPORTED_OPERATORS = ("Cast", "Constant", "ConstantOfShape", "Shape", "Size", "If")  # on the CPU, for any type


def run(model: ir.Model) -> int:
    """Rewrite a model of `half_precision` in place, and return how many nodes compute in float32 now.

    Cost: one pass over the nodes.
    """
    widening = _Widening(model)
    widening.widen_graph(model.graph)
    remove_unused.run(model)
    return widening.count


class _Widening:
    """Rewrites the nodes of a model. count: nodes that compute in float32."""

    def __init__(self, model: ir.Model) -> None:
        self.main_graph = model.graph
        self.count = 0
        self._float_values: dict[tuple[ir.Value, ir.Graph], ir.Value] = {}

    def widen_graph(self, graph: ir.Graph) -> None:
        for node in list(graph):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.widen_graph(attribute.as_graph())
            if node.op_type not in _SUPPORTED_OPERATORS:
                self._widen_node(graph, node)

    def _widen_node(self, graph: ir.Graph, node: ir.Node) -> None:
        half_inputs = [(i, v) for i, v in enumerate(node.inputs) if v is not None and v.dtype in _HALVES]
        half_outputs = [v for v in node.outputs if v.dtype in _HALVES]
        for i, value in half_inputs:
            node.replace_input_with(i, self._as_float(graph, value))
        for value in half_outputs:
            self._round_output(graph, node, value)
        self.count += bool(half_inputs or half_outputs)

    def _as_float(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """Return a value in float32: one cast for each graph, or a weight stored in float32."""
        cast_graph = self.main_graph if value.const_value is not None else graph
        if (value, cast_graph) not in self._float_values and value.const_value is not None:
            self._float_values[value, cast_graph] = self._float_weight(value)
        elif (value, cast_graph) not in self._float_values:
            cast = _cast(value, _FLOAT, f"{cast_graph.name}/{value.name}.widened")
            producer = value.producer()
            if producer is not None and producer.graph is cast_graph:
                cast_graph.insert_after(producer, cast)
            else:
                cast_graph.insert_before(cast_graph[0], cast)
            self._float_values[value, cast_graph] = cast.outputs[0]
        return self._float_values[value, cast_graph]

    def _float_weight(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        tensor = derived_tensor(value.const_value, lambda array: array.astype(np.float32), _FLOAT)
        name = f"{value.name}.widened"
        weight = ir.Value(name=name, shape=value.shape, type=ir.TensorType(_FLOAT), const_value=tensor)
        self.main_graph.initializers[name] = weight
        return weight

    def _round_output(self, graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
        """Let a node compute a value in float32, and cast the result to the half precision that the value had."""
        name, half = str(value.name), value.dtype
        assert half is not None
        cast = _cast(value, half, name)
        replace_value(value, cast.outputs[0], f"{name}.wide")
        value.type = ir.TensorType(_FLOAT)
        cast.replace_input_with(0, value)  # which the replacement changed too
        graph.insert_after(node, cast)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": to}, name=name)
    result = node.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(to), value.shape
    return node
