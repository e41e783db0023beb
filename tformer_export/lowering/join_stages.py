"""Join two stages into one model: the branches of one `If`, with every weight stored once outside it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateHashedInitializersPass

from tformer_export.common.ir_edit import copy_description
from tformer_export.lowering.to_onnx import IR_VERSION
from tformer_runtime.format import manifest

MAX_DEDUPLICATED_VALUES = 2**62  # no limit


def assemble(encode: ir.Model | None, decode: ir.Model | None) -> ir.Model:
    """Return one model of the given stages, which are consumed. Cost: one pass over the weights, to find equal ones."""
    stages = [stage for stage in (encode, decode) if stage is not None]
    for stage, prefix in ((encode, "encode/"), (decode, "decode/")):
        if stage is not None:
            _add_prefix(stage.graph, prefix)
    model = stages[0] if len(stages) == 1 else _join(*stages)
    DeduplicateHashedInitializersPass(size_limit=MAX_DEDUPLICATED_VALUES)(model)
    model.ir_version = IR_VERSION
    return model


def _join(encode: ir.Model, decode: ir.Model) -> ir.Model:
    """Return one model with an `If` on the input for the stage: decode if it is true, else encode."""
    flag = ir.Value(name=manifest.STAGE_INPUT, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    inputs = [flag, *encode.graph.inputs, *decode.graph.inputs]
    decoded, encoded = list(decode.graph.outputs), list(encode.graph.outputs)
    outputs = [*decoded, *encoded]
    then_branch = _branch(decode.graph, [], encoded)
    else_branch = _branch(encode.graph, decoded, [])
    initializers = [*_take_initializers(encode.graph), *_take_initializers(decode.graph)]
    choice = ir.node(
        "If",
        [flag],
        {"then_branch": then_branch, "else_branch": else_branch},
        num_outputs=len(outputs),
        name="stage",
    )
    for output, described in zip(choice.outputs, outputs, strict=True):
        copy_description(described, output)
        described.name = f"branch/{described.name}"
    for source in (encode.graph, decode.graph):
        source.inputs.clear()
    graph = ir.Graph(
        inputs,
        list(choice.outputs),
        nodes=[choice],
        initializers=initializers,
        opset_imports={**encode.graph.opset_imports, **decode.graph.opset_imports},
        name="tformer",
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _branch(graph: ir.Graph, before: list[ir.Value], after: list[ir.Value]) -> ir.Graph:
    """Return the graph as a branch with the outputs `before`, its own, and `after`.

    Outputs of the other stage are empty.
    """
    own_outputs = list(graph.outputs)
    outputs = [*(empty_like(graph, v) for v in before), *own_outputs, *(empty_like(graph, v) for v in after)]
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    return graph


def empty_like(graph: ir.Graph, like: ir.Value) -> ir.Value:
    """Return an empty tensor of another value's type and rank, computed in `graph`."""
    shape = [0] * len(like.shape or [])
    dtype = like.dtype or ir.DataType.FLOAT
    empty_tensor = ir.tensor(np.zeros(shape, dtype.numpy()), name=None)
    node = ir.node("Constant", [], {"value": empty_tensor}, name=f"no {like.name} in {graph.name}")
    node.outputs[0].name = f"{graph.name}/no/{like.name}"
    graph.append(node)
    return node.outputs[0]


def _take_initializers(graph: ir.Graph) -> list[ir.Value]:
    taken = list(graph.initializers.values())
    graph.initializers.clear()
    return taken


def _add_prefix(graph: ir.Graph, prefix: str) -> None:
    """Prefix all names of a stage except its inputs and outputs."""
    graph.name = prefix.rstrip("/")
    ports = {id(v) for v in (*graph.inputs, *graph.outputs)}
    for i, node in enumerate(graph.all_nodes()):
        node.name = f"{prefix}{node.op_type}.{i}"
        for value in node.outputs:
            if id(value) not in ports and value.name:
                value.name = prefix + value.name
    for value in list(graph.initializers.values()):
        if id(value) not in ports:
            name = str(value.name)
            del graph.initializers[name]
            value.name = prefix + name
            graph.initializers[value.name] = value
