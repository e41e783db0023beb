"""One stage of a model file with two, as a model of its own.

A file with an encoder has one graph whose stages are the branches of an `If`. CUDA graphs, for example, cannot be
captured for an `If`. So each stage can get a session of its own: its nodes move into the main graph, and what only the
other stage needs is left out. Both models hold the weights that both stages read, such as an embedding.
"""

from __future__ import annotations

from typing import Literal

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.manifest import STAGE_INPUT
from tformer_runtime.format.onnx_fields import (
    GRAPH_INPUT,
    GRAPH_NAME,
    GRAPH_OUTPUT,
    VALUE_INFO_NAME,
)
from tformer_runtime.format.onnx_graph import Graph, Node, keep_results, parse_model, remove_unread, rename_values
from tformer_runtime.format.onnx_wire import WireError, bytes_field, iter_fields

Stage = Literal["encode", "decode"]

_BRANCHES = {"decode": "then_branch", "encode": "else_branch"}


def extract_stage(model: bytes, stage: Stage) -> bytes:
    """Return a model whose graph is one stage of a model with both.

    model: as `model_file.read_mapped_model` returns it: weights are references into the file, which stay.
    Time and memory grow with the size of the model without its weights.
    Raise ModelFileError if the file has another form.
    """
    try:
        return _extract_stage(model, stage)
    except (WireError, UnicodeDecodeError) as error:
        raise ModelFileError("the file's graph is not whole: it is damaged, export the model again") from error


def _extract_stage(model: bytes, stage: Stage) -> bytes:
    parsed = parse_model(model)
    graph = parsed.graph
    choice = _find_choice(graph)
    branch = choice.branches.get(_BRANCHES[stage])
    if branch is None or len(branch.outputs) != len(choice.outputs):
        raise ModelFileError("the file's stages are not the branches of one If: export the model again")
    new_names = dict(zip(branch.outputs, choice.outputs, strict=True))
    for node in branch.nodes:
        rename_values(node, new_names)
    missing = _drop_empty_results(branch.nodes) & {*choice.outputs}
    # Nodes outside of the branches compute what both stages read, such as weights, or compute with their results.
    place = graph.nodes.index(choice)
    graph.nodes[place : place + 1] = branch.nodes
    for node in graph.nodes:
        if not missing.isdisjoint(node.names_read()):
            missing.update(node.outputs)
    graph.initializers.update(branch.initializers)
    graph.encoded_initializers.update(branch.encoded_initializers)
    graph.outputs = [name for name in graph.outputs if name not in missing]
    remove_unread(graph)
    read = graph.names_read()
    graph.rest = [field for field in graph.rest if _is_kept(field, read, missing)]
    graph.rest.append(bytes_field(GRAPH_NAME, stage.encode()))
    return parsed.encode()


def _find_choice(graph: Graph) -> Node:
    """Return the `If` that chooses the stage."""
    for node in graph.nodes:
        if node.op_type == "If" and node.inputs == [STAGE_INPUT]:
            return node
    raise ModelFileError("the file's stages are not the branches of one If: export the model again")


def _drop_empty_results(nodes: list[Node]) -> set[str]:
    """Return the names of constants, which a branch has as the outputs of the other stage.

    A branch may choose between two forms of its stage by another `If`, each with such constants. This `If` loses the
    outputs that are constants in both: their shapes are not those that the graph declares.
    """
    empty = {name for node in nodes if not node.inputs for name in node.outputs}
    for node in nodes:
        forms = list(node.branches.values())
        if node.op_type == "If" and all(len(form.outputs) == len(node.outputs) for form in forms):
            constants = [_drop_empty_results(form.nodes) for form in forms]
            kept = [
                not all(form.outputs[at] in names for form, names in zip(forms, constants, strict=True))
                for at in range(len(node.outputs))
            ]
            empty.update(name for name, keep in zip(node.outputs, kept, strict=True) if not keep)
            keep_results(node, kept)
    return empty


def _is_kept(encoded: bytes, read: set[str], missing: set[str]) -> bool:
    """Return whether a field of the graph, other than nodes and weights, belongs to the stage."""
    (field,) = iter_fields(encoded)
    if field.number == GRAPH_INPUT:
        return _value_name(field.content) in read
    return field.number == GRAPH_OUTPUT and _value_name(field.content) not in missing


def _value_name(value_info: bytes) -> str:
    return next((field.content.decode() for field in iter_fields(value_info) if field.number == VALUE_INFO_NAME), "")
