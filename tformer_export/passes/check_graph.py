"""The check of a graph after each rewrite, so that the error of an invalid graph names the rewrite that made it.

It costs milliseconds, because it reads no weight and writes no message, so that every export runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import onnx
import onnx_ir as ir

from tformer_runtime.base.errors import UnsupportedModelError

Ports = list[tuple[str | None, ir.DataType | None]]


def ports_of(model: ir.Model) -> Ports:
    """Return the names and types of a model's inputs, and then of its outputs."""
    return [(value.name, value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)]


def check_rewrite(model: ir.Model, name: str, ports: Ports | None = None) -> None:
    """Raise UnsupportedModelError if a rewrite has left an invalid graph.

    name: the name of the rewrite.
    ports: the model's ports before the rewrite, which have to be the same; None for a rewrite that may change them.
    """
    fault = next(_faults(model, model.graph, frozenset(), frozenset()), None)
    if fault is None and ports is not None and ports != ports_of(model):
        fault = "the model's inputs or outputs have other names or types"
    if fault is not None:
        raise UnsupportedModelError(
            f"the exporter's rewrite {name} made an invalid graph of this model: {fault}; no file was written: this is "
            "a fault of the exporter, so please report it with the model"
        )


def _faults(model: ir.Model, graph: ir.Graph, outer: frozenset[ir.Value], names: frozenset[str]) -> Iterator[str]:
    """Yield the faults of a graph and of its branches. outer, names: the values of the graphs around it."""
    known, taken = set(outer), set(names)
    for key, value in graph.initializers.items():
        if value.const_value is None or key != value.name:
            yield f"the weight '{key}' has no numbers, or another name"
    yield from _define(dict.fromkeys((*graph.inputs, *graph.initializers.values())), known, taken)
    for node in graph:
        label = f"the node '{node.name}' ({node.op_type})"
        if missing := [value for value in node.inputs if value is not None and value not in known]:
            yield f"{label} reads '{missing[0].name}', which no node before it computes"
        if node.domain not in model.graph.opset_imports:
            yield f"{label} has the domain '{node.domain}', which the model does not import"
        else:
            yield from (f"{label} {fault}" for fault in _signature_faults(node, model.graph.opset_imports[node.domain]))
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _faults(model, attribute.as_graph(), frozenset(known), frozenset(taken))
        yield from _define(node.outputs, known, taken)
    for value in graph.outputs:
        if value not in known - outer:
            yield f"the output '{value.name}' of the graph '{graph.name}' is computed nowhere in it"


def _define(values: Iterable[ir.Value], known: set[ir.Value], taken: set[str]) -> Iterator[str]:
    """Add values to those that are computed, and yield a fault for a name that is missing or taken."""
    for value in values:
        if value.name is None or (value.name == "" and any(value.uses())):
            yield "a value that is read has no name"
        elif value.name in taken:
            yield f"two values have the name '{value.name}'"
        elif value.name:
            taken.add(value.name)
        known.add(value)


def _signature_faults(node: ir.Node, version: int) -> Iterator[str]:
    """Yield the faults of a standard node's numbers of inputs and outputs, of its attributes and of its known types."""
    if node.domain:
        return
    signature = _signature(node.op_type, version)
    if signature is None:
        yield f"is no operator of ONNX {version}"
        return
    if len(node.inputs) not in signature.input_counts or len(node.outputs) not in signature.output_counts:
        yield f"has {len(node.inputs)} inputs and {len(node.outputs)} outputs"
    if unknown := node.attributes.keys() - signature.attributes:
        yield f"has the attribute '{min(unknown)}', which this operator does not have"
    if absent := signature.required - node.attributes.keys():
        yield f"has no attribute '{min(absent)}'"
    bound: dict[str, str] = {}  # type parameter → type
    for values, parameters in ((node.inputs, signature.inputs), (node.outputs, signature.outputs)):
        for index, value in enumerate(values):
            if value is None or not isinstance(value.type, ir.TensorType):  # a sequence, or unknown
                continue
            parameter = parameters[min(index, len(parameters) - 1)]
            kind = f"tensor({value.type.dtype.name.lower()})"
            if kind not in parameter.types:
                yield f"takes or gives '{value.name}' in the type {value.type.dtype}"
            elif parameter.is_homogeneous and bound.setdefault(parameter.name, kind) != kind:
                yield f"has '{value.name}' in another type than its other operands"


class _Parameter(NamedTuple):
    """An input or output of an operator.

    name: the name of its type parameter. types: the types that it may have.
    is_homogeneous: whether all values of a variadic parameter have one type.
    """

    name: str
    types: frozenset[str]
    is_homogeneous: bool


class _Signature(NamedTuple):
    """The parts of an operator's definition that a node has to match, read once."""

    input_counts: range
    output_counts: range
    attributes: frozenset[str]
    required: frozenset[str]
    inputs: tuple[_Parameter, ...]
    outputs: tuple[_Parameter, ...]


@cache
def _signature(operator: str, version: int) -> _Signature | None:
    """Return the signature of a standard operator; None if ONNX does not define it in this version."""
    if not onnx.defs.has(operator, version):
        return None
    schema = onnx.defs.get_schema(operator, version)
    inputs, outputs = (
        tuple(_Parameter(one.type_str, frozenset(one.types), one.is_homogeneous) for one in formal)
        for formal in (schema.inputs, schema.outputs)
    )
    return _Signature(
        range(schema.min_input, schema.max_input + 1),
        range(schema.min_output, schema.max_output + 1),
        frozenset(schema.attributes),
        frozenset(name for name, one in schema.attributes.items() if one.required),
        inputs,
        outputs,
    )
