"""ONNX models of a few nodes."""

from __future__ import annotations

from onnx import TensorProto, helper, numpy_helper


def model_of(nodes, inputs, outputs, weights, name="graph"):
    """Return a model with one graph.

    inputs, outputs: name → [shape] of float32, or (a type of TensorProto, [shape]).
    weights: name → array.
    name: the name of the graph.
    """
    graph = helper.make_graph(
        nodes,
        name,
        [make_port(*port) for port in inputs.items()],
        [make_port(*port) for port in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 23)]
    if any(node.domain == "com.microsoft" for node in nodes):
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def make_port(name, type_and_shape):
    kind, shape = type_and_shape if isinstance(type_and_shape, tuple) else (TensorProto.FLOAT, type_and_shape)
    return helper.make_tensor_value_info(name, kind, shape)
