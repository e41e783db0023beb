"""ONNX models of a few nodes."""

from __future__ import annotations

from onnx import TensorProto, helper, numpy_helper


def model_of(nodes, inputs, outputs, weights, name="graph"):
    """inputs, outputs: name → [shape] of float32, or (one of TensorProto's types, [shape]). weights: name → array.
    name: of the graph."""
    graph = helper.make_graph(
        nodes,
        name,
        [_port(*port) for port in inputs.items()],
        [_port(*port) for port in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 23)]
    if any(node.domain == "com.microsoft" for node in nodes):
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _port(name, given):
    kind, shape = given if isinstance(given, tuple) else (TensorProto.FLOAT, given)
    return helper.make_tensor_value_info(name, kind, shape)
