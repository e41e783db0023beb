"""Recognition of attention that native kernels compute: onnxruntime's GroupQueryAttention and MultiHeadAttention.

A file for long sequences has an attention twice, as the branches of an `If` on the size of its scores
(`tformer_export/passes/full_score_attention.py`). The kernels hold the scores of some rows only, so the `If` is
replaced by one attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tformer_runtime.format.onnx_graph import Attribute, Graph, Node, new_node, rename_values, tensor_array
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.float_product import find_constant
from tformer_runtime.rewriting.quantized_product import CONTRIB, Readers
from tformer_runtime.rewriting.stored_weights import is_operator

ATTENTION, CONTEXT_ATTENTION = "GroupQueryAttention", "MultiHeadAttention"
NATIVE_ATTENTION, NATIVE_CONTEXT_ATTENTION = "Attention", "ContextAttention"
PAST, COSINES, SINES, POSITION_IDS, SINK, INPUTS = 3, 7, 8, 9, 11, 12  # inputs of GroupQueryAttention, and their number
OUTPUTS = 3
CONTEXT_BIAS, CONTEXT_INPUTS = 5, 6  # of MultiHeadAttention
# Attributes that the kernels know, with the values of a node that lacks them; None for those that a node must have
_DEFAULTS: dict[str, Attribute | None] = {
    "num_heads": None,
    "kv_num_heads": None,
    "scale": None,
    "causal": 1,
    "do_rotary": 0,
    "rotary_interleaved": 0,
}
_CONTEXT_DEFAULTS: dict[str, Attribute | None] = {"num_heads": None, "scale": None}


def find_attention(
    graph: Graph, node: Node, read: set[str], files: WeightFiles, model_inputs: set[str], domain: str, path: int
) -> Node | None:
    """Return the native operator of an attention; None for nodes that the kernels do not compute.

    read: names of the values that the graph reads. model_inputs: names of weights that a caller may replace.
    domain: of the new node. path: the place of the kernels' path in the library.
    """
    if node.domain != CONTRIB:
        return None
    if node.op_type == ATTENTION:
        return _over_a_cache(graph, node, read, files, model_inputs, domain, path)
    return _over_a_context(node, domain, path) if node.op_type == CONTEXT_ATTENTION else None


def _over_a_context(node: Node, domain: str, path: int) -> Node | None:
    settings = _settings(node, _CONTEXT_DEFAULTS)
    inputs = [*node.inputs, *[""] * (CONTEXT_INPUTS - len(node.inputs))]
    if settings is None or len(inputs) > CONTEXT_INPUTS or len(node.outputs) > 1:
        return None
    query, key, value, *others, bias = inputs
    if any(others) or not (query and key and value):
        return None
    attributes = {"path": path, "heads": settings["num_heads"], "scale": settings["scale"], "shared": 0}
    return new_node(NATIVE_CONTEXT_ATTENTION, domain, [query, key, value, bias], node.outputs, attributes)


def _over_a_cache(
    graph: Graph, node: Node, read: set[str], files: WeightFiles, model_inputs: set[str], domain: str, path: int
) -> Node | None:
    settings = _settings(node, _DEFAULTS)
    inputs = [*node.inputs, *[""] * (INPUTS - len(node.inputs))]
    if settings is None or len(inputs) > INPUTS or inputs[POSITION_IDS]:
        return None
    if not settings["do_rotary"]:
        inputs[COSINES] = inputs[SINES] = ""
    elif not (inputs[COSINES] and inputs[SINES]):
        return None
    outputs = node.outputs
    if inputs[PAST]:
        if len(outputs) != OUTPUTS or not all(outputs):
            return None
    else:
        if inputs[COSINES] or not read.isdisjoint(outputs[1:]):
            return None
        outputs = outputs[:1]
    if inputs[SINK] and inputs[SINK] not in model_inputs and _is_nothing(graph, inputs[SINK], files):
        inputs[SINK] = ""
    del inputs[POSITION_IDS]
    attributes = {
        "path": path,
        "heads": settings["num_heads"],
        "groups": settings["kv_num_heads"],
        "causal": settings["causal"],
        "scale": settings["scale"],
        "interleaved": settings["rotary_interleaved"],
    }
    return new_node(NATIVE_ATTENTION, domain, inputs, outputs, attributes)


def share_contexts(graph: Graph, files: WeightFiles, model_inputs: set[str], domain: str) -> None:
    """Remove the reshapes around each native attention over a context, and the expansion of its bias.

    `tformer_export/passes/shared_encoder_context.py` has put them there, so that rows may share a context. The native
    operator divides the queries among the rows of keys itself: as no other shape of the queries fits the keys, any
    reshape before it does the same. Its bias may be the same for all queries.

    model_inputs, domain: see `find_attention`.
    """
    readers = Readers(graph)
    new_nodes: dict[int, Node | None] = {}
    for node in graph.nodes:
        if node.op_type != NATIVE_CONTEXT_ATTENTION or node.domain != domain:
            continue
        merged, key, value, bias = node.inputs
        merge, split = graph.producers.get(merged), readers.only_reader(node.outputs[0])
        if (
            merge is None
            or split is None
            or not (is_operator(merge, "Reshape", 2) and is_operator(split, "Reshape", 2))
        ):
            continue
        query, size = merge.inputs[0], graph.producers.get(split.inputs[1])
        if size is None or not _is_whole_shape(size, query):
            continue
        inputs = [query, key, value, _unexpanded(graph, bias, files, model_inputs)]
        attributes = {**node.number_attributes(), "shared": 1}
        new_nodes[id(node)] = new_node(NATIVE_CONTEXT_ATTENTION, domain, inputs, split.outputs, attributes)
        new_nodes[id(split)] = None
    graph.replace_nodes(new_nodes)


def _is_whole_shape(node: Node, name: str) -> bool:
    """Return whether a node computes the sizes of all axes of a value."""
    return is_operator(node, "Shape", 1) and node.inputs[0] == name and node.attributes() in ({}, {"start": 0})


def _unexpanded(graph: Graph, bias: str, files: WeightFiles, model_inputs: set[str]) -> str:
    """Return the name of a bias before it was repeated for all queries; the name itself for any other bias."""
    expansion = graph.producers.get(bias)
    if expansion is None or not is_operator(expansion, "Expand", 2):
        return bias
    shape = graph.producers.get(expansion.inputs[1])
    if shape is None or shape.op_type != "Concat" or shape.domain or len(shape.inputs) != 3:
        return bias
    ones = [find_constant(graph, shape.inputs[i], np.int64, model_inputs) for i in (0, 2)]
    arrays = [tensor_array(tensor, files.read) if tensor is not None else None for tensor in ones]
    lengths = [len(a) if a is not None and a.ndim == 1 and (a == 1).all() else 0 for a in arrays]
    return expansion.inputs[0] if lengths == [2, 1] else bias


def merge_branches(graph: Graph, domain: str) -> None:
    """Replace each `If` whose branches have become the same attention by this attention."""
    for i, node in enumerate(graph.nodes):
        branches = list(node.branches.values())
        inner = [branch.nodes[0] for branch in branches if len(branch.nodes) == 1]
        if node.op_type != "If" or len(inner) != 2 or any(n.domain != domain for n in inner):
            continue
        own_weights = any(name in branch.initializers for branch in branches for name in inner[0].inputs)
        if own_weights or len(inner[0].outputs) != len(node.outputs):
            continue
        same = inner[0].inputs == inner[1].inputs and inner[0].attributes() == inner[1].attributes()
        if same and all(branch.outputs == n.outputs for branch, n in zip(branches, inner, strict=True)):
            rename_values(inner[0], dict(zip(inner[0].outputs, node.outputs, strict=True)))
            graph.nodes[i] = inner[0]
    graph.index()


def _settings(node: Node, defaults: Mapping[str, Attribute | None]) -> dict[str, int | float] | None:
    """Return the attributes of an attention with their defaults; None if the kernels do not know them."""
    given, names = node.attributes(), node.attribute_names()
    if not set(names) <= set(defaults) or len(names) != len(given):  # unknown, twice, or without a number
        return None
    settings = {**defaults, **given}
    numbers = {name: value for name, value in settings.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(defaults) and numbers["scale"] > 0 else None


def _is_nothing(graph: Graph, name: str, files: WeightFiles) -> bool:
    """Return whether the sinks of all heads have the lowest score, and so no weight."""
    tensor = graph.find_tensor(name)
    if tensor is None or tensor.dtype != np.float32 or not files.is_whole(tensor):
        return False
    sinks = tensor_array(tensor, files.read)
    return sinks is not None and bool((sinks == np.finfo(np.float32).min).all())
