"""One stage of a model file as a model of its own.

onnxruntime captures no CUDA graph of a session with an `If`. So the stages are cut out of it: a branch becomes a graph,
with those of the file's inputs and weights that it reads. Only a few kilobytes are copied, for weights are references
into the file (`modelfile.mapped`); what both stages read, such as an embedding, is held by both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.onnx_wire import Field, WireError, fields, message

Stage = Literal["encode", "decode"]

# Field numbers of onnx.proto: of ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto, ValueInfoProto
_MODEL_GRAPH = 7
_NODE, _GRAPH_NAME, _INITIALIZER, _INPUT, _OUTPUT = 1, 2, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _NODE_OP, _NODE_ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_GRAPH = 1, 6
_TENSOR_NAME = 8
_NAME = 1
_BRANCHES = {"decode": b"then_branch", "encode": b"else_branch"}


def cut(model: bytes, stage: Stage) -> bytes:
    """The model whose graph is one stage of a model with both.

    model: as `modelfile.mapped` gives it. Time and memory: those of the model without its weights. ModelFileError if
    the file has another form.
    """
    try:
        return _cut(model, stage)
    except WireError as error:
        raise ModelFileError("the file's graph is not whole: it is damaged, export the model again") from error


def _cut(model: bytes, stage: Stage) -> bytes:
    graph = [field for part in fields(model) if part.number == _MODEL_GRAPH for field in fields(part.content)]
    branch = list(fields(_branch(graph, stage)))
    nodes = [field.content for field in branch if field.number == _NODE]
    outputs = [_texts(field.content, _NAME)[0] for field in graph if field.number == _OUTPUT]
    names = dict(zip((_texts(f.content, _NAME)[0] for f in branch if f.number == _OUTPUT), outputs, strict=True))
    # What belongs to the other stage is a constant without numbers, made for it.
    empty = {name for node in nodes if not _texts(node, _NODE_INPUT) for name in _texts(node, _NODE_OUTPUT)} & {*names}
    own = {name for made, name in names.items() if made not in empty}
    read = {name for node in nodes for name in _reads(node)}
    kept = [message(_NODE, _renamed(n, names)) for n in nodes if not {*_texts(n, _NODE_OUTPUT)} & empty]
    for field in (*graph, *branch):
        if field.number == _INITIALIZER and _texts(field.content, _TENSOR_NAME)[0] in read:
            kept.append(field.whole)
    for field in graph:
        if (field.number == _INPUT and _texts(field.content, _NAME)[0] in read) or (
            field.number == _OUTPUT and _texts(field.content, _NAME)[0] in own
        ):
            kept.append(field.whole)
    rest = b"".join(field.whole for field in fields(model) if field.number != _MODEL_GRAPH)
    return rest + message(_MODEL_GRAPH, b"".join([*kept, message(_GRAPH_NAME, stage.encode())]))


def _branch(graph: list[Field], stage: Stage) -> bytes:
    for node in graph:
        if node.number == _NODE and _texts(node.content, _NODE_OP) == [b"If"]:
            for attribute in _texts(node.content, _NODE_ATTRIBUTE):
                if _texts(attribute, _ATTRIBUTE_NAME) == [_BRANCHES[stage]]:
                    return _texts(attribute, _ATTRIBUTE_GRAPH)[0]
    raise ModelFileError("the file's stages are not the branches of one If: export the model again")


def _reads(node: bytes) -> Iterator[bytes]:
    """What a node reads, in branches of its own too."""
    yield from _texts(node, _NODE_INPUT)
    for attribute in _texts(node, _NODE_ATTRIBUTE):
        for graph in _texts(attribute, _ATTRIBUTE_GRAPH):
            for inner in _texts(graph, _NODE):
                yield from _reads(inner)
            for output in _texts(graph, _OUTPUT):
                yield from _texts(output, _NAME)


def _renamed(node: bytes, names: dict[bytes, bytes]) -> bytes:
    parts = []
    for field in fields(node):
        if field.number in (_NODE_INPUT, _NODE_OUTPUT):
            parts.append(message(field.number, names.get(field.content, field.content)))
        else:
            parts.append(field.whole)
    return b"".join(parts)


def _texts(content: bytes, number: int) -> list[bytes]:
    return [field.content for field in fields(content) if field.number == number]
