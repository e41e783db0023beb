"""Small changes of an exported graph, as a wrong pass or a damaged file would make them.

Each is made at one place: an operation is left out, gets its operands in another order, another attribute or another
operator; a weight or a constant changes as a whole, in one row or by one; a value is mixed with that of another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OTHER_OPERATORS = {
    "Tanh": "Sigmoid", "Sigmoid": "Tanh", "Relu": "Abs", "Gelu": "Relu", "Erf": "Tanh", "Sqrt": "Abs", "Exp": "Abs",
    "ReduceMean": "ReduceSum", "ReduceSum": "ReduceMean", "ReduceMax": "ReduceMin", "Max": "Min", "Min": "Max",
    "Less": "LessOrEqual", "LessOrEqual": "Less", "Greater": "GreaterOrEqual", "GreaterOrEqual": "Greater",
    "And": "Or", "Or": "And", "Cos": "Sin", "Sin": "Cos", "Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul",
    "LayerNormalization": "RMSNormalization",
}  # fmt: skip
ORDERED = {"Sub", "Div", "MatMul", "Where", "Less", "Greater", "Gather", "Pow", "Concat", "Gemm"}
MIXED = 0.3  # of the value of another row


@dataclass(frozen=True)
class Mutation:
    """A changed copy of a model. name: the kind and the place of the change."""

    name: str
    model: onnx.ModelProto


def mutations(model: onnx.ModelProto, seed: int = 0) -> Iterator[Mutation]:
    """Yield all mutations of a model, in random order."""
    places = [*_places(model.graph, ())]
    order = np.random.default_rng(seed).permutation(len(places))
    for i in order:
        kind, path, which, detail = places[i]
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        graph = _graph_at(copy.graph, path)
        name = _CHANGES[kind](graph, which, detail)
        yield Mutation(f"{kind}: {name}", copy)


def _places(graph: onnx.GraphProto, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], int, Any]]:
    for number, node in enumerate(graph.node):
        if node.op_type == "If":
            for attribute in node.attribute:
                yield from _places(attribute.g, (*path, (number, attribute.name)))
            continue
        if len(node.output) == 1 and node.input and node.op_type not in ("Shape", "Constant", "Cast", "Identity"):
            yield "left out", path, number, None
            yield "another row", path, number, None
        if node.op_type in ORDERED and len(node.input) > 1:
            yield "other order", path, number, None
        if node.op_type in OTHER_OPERATORS:
            yield "other operator", path, number, None
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.INTS):
                yield "other attribute", path, number, attribute.name
    for number, tensor in enumerate(graph.initializer):
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and values.size > 1:
            for how in ("scaled", "rolled", "negated row", "last row"):
                yield "weight", path, number, how
        elif values.dtype.kind in "if" and values.size:
            yield "constant", path, number, None


def _graph_at(graph: onnx.GraphProto, path: tuple[Any, ...]) -> onnx.GraphProto:
    for number, name in path:
        graph = next(a.g for a in graph.node[number].attribute if a.name == name)
    return graph


def _leave_out(graph: onnx.GraphProto, number: int, _: Any) -> str:
    node = graph.node[number]
    name = f"{node.op_type} {node.output[0]}"
    node.CopyFrom(helper.make_node("Identity", [node.input[0]], [node.output[0]]))
    return name


def _mix_rows(graph: onnx.GraphProto, number: int, _: Any) -> str:
    """Add a part of the value of the row at the other end of the batch: with one row, nothing changes."""
    node = graph.node[number]
    output, plain = node.output[0], f"{node.output[0]}__plain"
    node.output[0] = plain
    constants = {"begin": [-1], "end": [-(2**31)], "axes": [0], "steps": [-1]}
    added = [
        helper.make_node("Constant", [], [f"{plain}_{name}"], value=numpy_helper.from_array(np.array(value)))
        for name, value in constants.items()
    ]
    mixed = numpy_helper.from_array(np.array(MIXED, np.float32))
    added += [
        helper.make_node("Slice", [plain, *(f"{plain}_{name}" for name in constants)], [f"{plain}_turned"]),
        helper.make_node("Sub", [f"{plain}_turned", plain], [f"{plain}_change"]),
        helper.make_node("Constant", [], [f"{plain}_share"], value=mixed),
        helper.make_node("Mul", [f"{plain}_change", f"{plain}_share"], [f"{plain}_part"]),
        helper.make_node("Add", [plain, f"{plain}_part"], [output]),
    ]
    nodes = [*graph.node]
    nodes[number + 1 : number + 1] = added
    del graph.node[:]
    graph.node.extend(nodes)
    return f"{node.op_type} {output}"


def _swap(graph: onnx.GraphProto, number: int, _: Any) -> str:
    node = graph.node[number]
    first = 1 if node.op_type == "Where" else 0
    node.input[first], node.input[first + 1] = node.input[first + 1], node.input[first]
    return f"{node.op_type} {node.output[0]}"


def _replace_operator(graph: onnx.GraphProto, number: int, _: Any) -> str:
    node = graph.node[number]
    name = f"{node.op_type} {node.output[0]}"
    node.op_type = OTHER_OPERATORS[node.op_type]
    if node.op_type == "RMSNormalization":
        del node.input[2:]
    return name


def _change_attribute(graph: onnx.GraphProto, number: int, name: str) -> str:
    node = graph.node[number]
    attribute = next(a for a in node.attribute if a.name == name)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = attribute.i - 1 if attribute.i > 0 else attribute.i + 1
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = attribute.f * 1.5 if attribute.f else 0.5
    elif len(attribute.ints) > 1:
        attribute.ints[-1], attribute.ints[-2] = attribute.ints[-2], attribute.ints[-1]
    return f"{node.op_type}.{name} {node.output[0]}"


def _change_weight(graph: onnx.GraphProto, number: int, how: str) -> str:
    tensor = graph.initializer[number]
    values = numpy_helper.to_array(tensor).copy()
    if how == "scaled":
        values *= 1.05
    elif how == "rolled":
        values = np.roll(values, 1, 0)
    else:
        values[0 if how == "negated row" else -1] *= -1
    tensor.CopyFrom(numpy_helper.from_array(values.astype(values.dtype), tensor.name))
    return f"{how} {tensor.name}"


def _change_constant(graph: onnx.GraphProto, number: int, _: Any) -> str:
    tensor = graph.initializer[number]
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[-1] += 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return tensor.name


_CHANGES = {
    "left out": _leave_out,
    "another row": _mix_rows,
    "other order": _swap,
    "other operator": _replace_operator,
    "other attribute": _change_attribute,
    "weight": _change_weight,
    "constant": _change_constant,
}
