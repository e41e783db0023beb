"""One stage of a model file as a model of its own.

onnxruntime captures no CUDA graph of a session with an `If`. So the runtime extracts the stages: a branch becomes a
graph, with the file's inputs and weights that it reads, and with the nodes outside of the branches that compute what
it reads or that compute with its results. Weights are references into the file
(`model_file.read_mapped_model`), so that only a few kilobytes are copied. Both models hold the weights that both stages
read, such as an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.manifest import STAGE_INPUT
from tformer_runtime.format.onnx_fields import (
    ATTRIBUTE_G,
    ATTRIBUTE_NAME,
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    GRAPH_NAME,
    GRAPH_NODE,
    GRAPH_OUTPUT,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    NODE_INPUT,
    NODE_OP_TYPE,
    NODE_OUTPUT,
    TENSOR_NAME,
    VALUE_INFO_NAME,
)
from tformer_runtime.format.onnx_wire import Field, WireError, bytes_field, iter_fields

Stage = Literal["encode", "decode"]

_BRANCHES = {"decode": b"then_branch", "encode": b"else_branch"}


def extract_stage(model: bytes, stage: Stage) -> bytes:
    """Return a model whose graph is one stage of a model with both.

    model: as `model_file.read_mapped_model` returns it.
    Time and memory grow with the size of the model without its weights.
    Raise ModelFileError if the file has another form.
    """
    try:
        return _extract_stage(model, stage)
    except WireError as error:
        raise ModelFileError("the file's graph is not whole: it is damaged, export the model again") from error


def _extract_stage(model: bytes, stage: Stage) -> bytes:
    graph = [field for part in iter_fields(model) if part.number == MODEL_GRAPH for field in iter_fields(part.content)]
    nodes = [field.content for field in graph if field.number == GRAPH_NODE]
    choice = _find_choice(nodes)
    branch = list(iter_fields(_branch(nodes[choice], stage)))
    branch_outputs = [_value_name(field) for field in branch if field.number == GRAPH_OUTPUT]
    new_names = dict(zip(branch_outputs, _contents(nodes[choice], NODE_OUTPUT), strict=True))
    inner = [_rename_values(field.content, new_names) for field in branch if field.number == GRAPH_NODE]
    # A branch returns empty constants for the outputs of the other stage.
    missing = {
        name
        for node in inner
        if not _contents(node, NODE_INPUT)
        for name in _contents(node, NODE_OUTPUT)
        if name in {*new_names.values()}
    }
    # Nodes outside of the branches compute what both stages read, such as weights, or compute with their results.
    nodes = [*nodes[:choice], *inner, *nodes[choice + 1 :]]
    for node in nodes:
        if not missing.isdisjoint(_names_read(node)):
            missing.update(_contents(node, NODE_OUTPUT))
    model_outputs = {_value_name(field) for field in graph if field.number == GRAPH_OUTPUT}
    read, kept = model_outputs - missing, []
    for node in reversed(nodes):
        if not read.isdisjoint(_contents(node, NODE_OUTPUT)):
            kept.append(node)
            read.update(_names_read(node))
    parts = [bytes_field(GRAPH_NODE, node) for node in reversed(kept)]
    for field in (*graph, *branch):
        if field.number == GRAPH_INITIALIZER and _contents(field.content, TENSOR_NAME)[0] in read:
            parts.append(field.encoded)
    for field in graph:
        if (field.number == GRAPH_INPUT and _value_name(field) in read) or (
            field.number == GRAPH_OUTPUT and _value_name(field) not in missing
        ):
            parts.append(field.encoded)
    rest = b"".join(field.encoded for field in iter_fields(model) if field.number != MODEL_GRAPH)
    return rest + bytes_field(MODEL_GRAPH, b"".join([*parts, bytes_field(GRAPH_NAME, stage.encode())]))


def _find_choice(nodes: list[bytes]) -> int:
    """Return the number of the `If` that chooses the stage."""
    for number, node in enumerate(nodes):
        if _contents(node, NODE_OP_TYPE) == [b"If"] and _contents(node, NODE_INPUT) == [STAGE_INPUT.encode()]:
            return number
    raise ModelFileError("the file's stages are not the branches of one If: export the model again")


def _branch(choice: bytes, stage: Stage) -> bytes:
    """Return the GraphProto of a stage."""
    for attribute in _contents(choice, NODE_ATTRIBUTE):
        if _contents(attribute, ATTRIBUTE_NAME) == [_BRANCHES[stage]]:
            return _contents(attribute, ATTRIBUTE_G)[0]
    raise ModelFileError("the file's stages are not the branches of one If: export the model again")


def _names_read(node: bytes) -> Iterator[bytes]:
    """Yield the names of the values that a node reads, also in its branches."""
    yield from _contents(node, NODE_INPUT)
    for attribute in _contents(node, NODE_ATTRIBUTE):
        for graph in _contents(attribute, ATTRIBUTE_G):
            for inner in _contents(graph, GRAPH_NODE):
                yield from _names_read(inner)
            for output in _contents(graph, GRAPH_OUTPUT):
                yield from _contents(output, VALUE_INFO_NAME)


def _rename_values(node: bytes, new_names: dict[bytes, bytes]) -> bytes:
    """Return a NodeProto with other names of values, also of those that its own branches read."""
    parts = []
    for field in iter_fields(node):
        if field.number in (NODE_INPUT, NODE_OUTPUT):
            parts.append(bytes_field(field.number, new_names.get(field.content, field.content)))
        elif field.number == NODE_ATTRIBUTE and _contents(field.content, ATTRIBUTE_G):
            parts.append(bytes_field(NODE_ATTRIBUTE, _rename_in_graph(field.content, new_names)))
        else:
            parts.append(field.encoded)
    return b"".join(parts)


def _rename_in_graph(attribute: bytes, new_names: dict[bytes, bytes]) -> bytes:
    """Return an AttributeProto with the values of its graph renamed."""
    parts = []
    for field in iter_fields(attribute):
        if field.number != ATTRIBUTE_G:
            parts.append(field.encoded)
            continue
        inner = (
            bytes_field(GRAPH_NODE, _rename_values(each.content, new_names))
            if each.number == GRAPH_NODE
            else each.encoded
            for each in iter_fields(field.content)
        )
        parts.append(bytes_field(ATTRIBUTE_G, b"".join(inner)))
    return b"".join(parts)


def _value_name(value_info: Field) -> bytes:
    return _contents(value_info.content, VALUE_INFO_NAME)[0]


def _contents(message: bytes, number: int) -> list[bytes]:
    """Return the contents of a message's fields with this number."""
    return [field.content for field in iter_fields(message) if field.number == number]
