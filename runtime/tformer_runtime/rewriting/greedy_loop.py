"""Greedy loops: a decode stage of native operators alone feeds its likeliest tokens to itself.

A step of a small model takes less time than what Python does between two steps. So the chain of its decode stage can
run several steps at once (`runtime/kernels/src/greedy_loop.h`, which describes the input GREEDY_PLAN). The operators
around the chain, which look up rows of tables, add or multiply, and select positions, become native ones for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer_runtime.format.manifest import (
    ADAPTER_ROWS,
    GREEDY_PLAN,
    LAST_POSITION,
    NEW_COUNTS,
    POSITIONS,
    SELECTED_TOKENS,
    SLOT_INDICES,
    STAGE_INPUT,
    START_SLOT,
    TOTAL_SLOTS,
    DecodeStage,
)
from tformer_runtime.format.onnx_fields import (
    DATA_TYPE_FLOAT,
    DATA_TYPE_INT64,
    DIMENSION_DIM_PARAM,
    GRAPH_INPUT,
    TENSOR_SHAPE_DIM,
    TYPE_TENSOR_ELEM_TYPE,
    TYPE_TENSOR_SHAPE,
    TYPE_TENSOR_TYPE,
    VALUE_INFO_NAME,
    VALUE_INFO_TYPE,
)
from tformer_runtime.format.onnx_graph import Graph, Node, needed_nodes, new_node
from tformer_runtime.format.onnx_wire import bytes_field, varint_field
from tformer_runtime.rewriting.operator_chain import MAX_CHAIN, Loop, new_chain
from tformer_runtime.rewriting.quantized_product import Readers
from tformer_runtime.rewriting.stored_weights import is_operator

_COUNTS = (POSITIONS, LAST_POSITION, TOTAL_SLOTS)  # control inputs that grow by 1 at each step of one token
_OTHER_COUNTS = (START_SLOT, SLOT_INDICES, NEW_COUNTS)  # of caches that a loop does not know


def make_greedy_loop(graph: Graph, decode: DecodeStage, domain: str, parts: int) -> bool:
    """Make the decode stage of a model one chain that can run several steps. Return False, and change nothing, if the
    stage has operators that the library lacks.

    graph: of the whole model, with native operators, before chains are made.
    domain, parts: as for `make_chains`.
    """
    stage = _find_stage(graph, decode.logits.name)
    if stage is None or not all(cache.in_place for cache in decode.caches) or decode.features:
        return False
    branch, names = stage
    outputs = [decode.logits.name, *(cache.present for cache in decode.caches)]
    if any(name not in names for name in outputs) or GREEDY_PLAN in graph.names_read() | graph.input_names():
        return False
    results = [names[name] for name in outputs]
    indices = {POSITIONS, SELECTED_TOKENS, ADAPTER_ROWS} & graph.input_names()  # int64
    if decode.step.dtype == "int64":
        indices.add(decode.step.name)
    changing = {decode.step.name, *_COUNTS, *_OTHER_COUNTS, *(cache.past for cache in decode.caches)}
    conversion = _Conversion(branch, graph.input_names(), indices, changing, domain)
    members = conversion.convert(needed_nodes(branch.nodes, results), results)
    if members is None or len(members) > MAX_CHAIN:
        return False
    read = {name for node in members for name in node.inputs}
    if decode.step.name not in read or not read.isdisjoint(_OTHER_COUNTS):
        return False
    if any(cache.past not in read for cache in decode.caches):
        return False
    loop = Loop(
        tokens=decode.step.name,
        logits=names[decode.logits.name],
        plan=GREEDY_PLAN,
        counts=tuple(name for name in _COUNTS if name in read),
        caches=tuple((cache.past, names[cache.present]) for cache in decode.caches),
    )
    before, after = _other_nodes(branch, members)
    if _is_read(loop.logits, branch, after) or (
        branch is not graph and _is_read(decode.logits.name, graph, graph.nodes)
    ):
        return False
    branch.nodes = [*before, *members, *after]
    branch.nodes = [*before, new_chain(members, domain, Readers(branch), parts, loop), *after]
    branch.index()
    element = varint_field(TYPE_TENSOR_ELEM_TYPE, DATA_TYPE_INT64)
    value = bytes_field(VALUE_INFO_NAME, GREEDY_PLAN.encode())
    value += bytes_field(VALUE_INFO_TYPE, bytes_field(TYPE_TENSOR_TYPE, element + _FREE_AXIS))
    graph.rest.append(bytes_field(GRAPH_INPUT, value))
    return True


_FREE_AXIS = bytes_field(TYPE_TENSOR_SHAPE, bytes_field(TENSOR_SHAPE_DIM, bytes_field(DIMENSION_DIM_PARAM, b"plan")))


def _find_stage(graph: Graph, logits: str) -> tuple[Graph, dict[str, str]] | None:
    """Return the graph of the decode stage, and output of the model → its name there; None for another form."""
    node = graph.producers.get(logits)
    if node is None:
        return None
    if node.op_type != "If" or node.domain:
        return graph, {name: name for name in graph.outputs}
    branch = node.branches.get("then_branch")
    if branch is None or node.inputs != [STAGE_INPUT] or len(branch.outputs) != len(node.outputs):
        return None
    return branch, dict(zip(node.outputs, branch.outputs, strict=True))


def _other_nodes(graph: Graph, members: list[Node]) -> tuple[list[Node], list[Node]]:
    """Return the other nodes of a graph whose results are read: those that depend on no result of `members`, and those
    that do.
    """
    computed = {name for node in members for name in node.outputs}
    read = {*graph.outputs}.union(*(node.inputs for node in members))
    others = [node for node in graph.nodes if computed.isdisjoint(node.outputs)]
    before, after = [], []
    for node in needed_nodes(others, read):
        if computed.isdisjoint(node.names_read()):
            before.append(node)
        else:
            after.append(node)
            computed |= {*node.outputs}
    return before, after


def _is_read(logits: str, graph: Graph, nodes: list[Node]) -> bool:
    """Return whether nodes or a second output read the logits. They would get those of several steps."""
    return graph.outputs.count(logits) > 1 or any(logits in node.names_read() for node in nodes)


class _Conversion:
    """Native operators for those of a decode stage whose results change from step to step.

    A value is float32 if a native operator computes it, or if it is a weight of this type.
    """

    def __init__(self, graph: Graph, inputs: set[str], indices: set[str], changing: set[str], domain: str) -> None:
        """
        inputs: of the model. A weight of the same name may be replaced by them.
        indices: the inputs of int64.
        changing: the inputs that change from step to step, but not in their shapes.
        """
        self._graph, self._inputs, self._indices, self._domain = graph, inputs, indices, domain
        self._changing = set(changing)
        self._originals: dict[str, Node] = {}  # result → its node before the conversion
        self._native: set[str] = set()

    def convert(self, nodes: list[Node], outputs: Sequence[str]) -> list[Node] | None:
        """Return native operators that compute the outputs, in their order; None if there is none for a node.

        nodes: that compute the outputs, in their order. A node may become a part of the operator of a later one. Those
            whose results do not change are left to onnxruntime, which computes them once.
        """
        members: list[Node] = []
        for node in nodes:
            reads_shape = is_operator(node, "Shape", 1) and node.inputs[0] in self._inputs
            is_constant = reads_shape or self._changing.isdisjoint(node.names_read())
            if is_constant and node.domain != self._domain:
                self._originals |= dict.fromkeys(node.outputs, node)
                continue
            self._changing |= {name for name in node.outputs if name}
            new = node if node.domain == self._domain else self._convert(node)
            self._originals |= dict.fromkeys(node.outputs, node)
            if new is not None:
                members.append(new)
                self._native |= {name for name in new.outputs if name}
        kept = needed_nodes(members, outputs)
        read = {*outputs}.union(*(node.inputs for node in kept))
        has_all = read.isdisjoint((self._originals.keys() & self._changing) - self._native)
        return kept if has_all else None

    def _convert(self, node: Node) -> Node | None:
        """Return a native operator; None if there is none for the node alone."""
        if is_operator(node, "Gather", 2):
            return self._lookup(node)
        if is_operator(node, "Mul", 2):
            return self._scaled_lookup(node) or self._arithmetic(node)
        if is_operator(node, "Add", 2):
            return self._arithmetic(node)
        return self._select(node) if is_operator(node, "GatherND", 2) else None

    def _original(self, name: str, op_type: str, inputs: int) -> Node | None:
        """Return the node that computed a value before the conversion, if it is this operator."""
        node = self._originals.get(name)
        return node if node is not None and is_operator(node, op_type, inputs) else None

    def _lookup(self, node: Node) -> Node | None:
        table, indices = node.inputs
        if node.attributes().get("axis", 0) != 0 or indices not in self._indices:
            return None
        return self._new("Lookup", [table, indices], node) if self._is_weight(table, np.float32, 2) else None

    def _scaled_lookup(self, node: Node) -> Node | None:
        """Return the operator for rows of int8 times the scales of the rows."""
        for floats, scales in (node.inputs, node.inputs[::-1]):
            cast, scale = self._original(floats, "Cast", 1), self._original(scales, "Gather", 2)
            rows = self._original(cast.inputs[0], "Gather", 2) if cast is not None else None
            if cast is None or scale is None or rows is None or cast.attributes().get("to") != DATA_TYPE_FLOAT:
                continue
            is_by_rows = all(gather.attributes().get("axis", 0) == 0 for gather in (rows, scale))
            if not is_by_rows or rows.inputs[1] != scale.inputs[1] or rows.inputs[1] not in self._indices:
                continue
            if self._is_weight(rows.inputs[0], np.int8, 2) and self._is_scale(scale.inputs[0], rows.inputs[0]):
                return self._new("Lookup", [*rows.inputs, scale.inputs[0]], node)
        return None

    def _arithmetic(self, node: Node) -> Node | None:
        if self._native.isdisjoint(node.inputs) or not all(self._is_float(name) for name in node.inputs):
            return None
        return self._new("Arithmetic", node.inputs, node, {"multiplies": int(node.op_type == "Mul")})

    def _select(self, node: Node) -> Node | None:
        values, indices = node.inputs
        unsqueeze = self._original(indices, "Unsqueeze", 2)
        if values not in self._native or unsqueeze is None:
            return None
        axes = self._graph.find_tensor(unsqueeze.inputs[1])
        is_last = (
            axes is not None and axes.raw is not None and np.frombuffer(axes.raw, np.int64).tolist() in ([-1], [2])
        )
        if not is_last or unsqueeze.inputs[0] not in self._indices or node.attributes().get("batch_dims") != 1:
            return None
        return self._new("Select", [values, unsqueeze.inputs[0]], node)

    def _is_float(self, name: str) -> bool:
        return name in self._native or self._is_weight(name, np.float32)

    def _is_weight(self, name: str, dtype: type[np.generic], rank: int | None = None) -> bool:
        """Return whether a value is a weight of this type, which nothing replaces."""
        tensor = self._graph.find_tensor(name) if name not in self._inputs else None
        return tensor is not None and tensor.dtype == dtype and (rank is None or len(tensor.shape) == rank)

    def _is_scale(self, name: str, table: str) -> bool:
        scale, rows = self._graph.find_tensor(name), self._graph.find_tensor(table)
        return (
            self._is_weight(name, np.float32, 2)
            and rows is not None
            and scale is not None
            and (scale.shape == (rows.shape[0], 1))
        )

    def _new(self, kind: str, inputs: list[str], node: Node, attributes: dict[str, int] | None = None) -> Node:
        return new_node(kind, self._domain, inputs, node.outputs, attributes or {})
