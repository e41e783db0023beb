"""Attention over the context by several rows that have the same: beams read their source's keys and values once.

The rows of a query, (C · G, N, width) with the rows of one context beside each other, are the positions of C queries of
G · N positions each, (C, G · N, width): the same numbers in the same order. So the context may have C rows where the
step input has C · G, whatever G is; with G = 1 nothing changes but for two reshapes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.common.names import CONTEXT
from tformer_export.passes import remove_unused

KEY, VALUE, BIAS = 1, 2, 5  # inputs of MultiHeadAttention


def run(model: ir.Model) -> int:
    """The number of attentions rewritten: all that read the context, or none if anything else needs its rows."""
    context = {v for v in model.graph.inputs if (v.name or "").startswith(CONTEXT)}
    attentions = [node for node in model.graph.all_nodes() if _over(node, context)]
    known = {*attentions, *(wide for node in attentions if (wide := _widened(node)) is not None)}
    if not attentions or any(_by_row(value) or not _only_for(value, known) for value in context):
        return 0
    rewriter = _Rewriter(model, attentions[0])
    for node in attentions:
        rewriter.rewrite(node)
    remove_unused.run(model)
    sizes = {use.node for value in context for use in value.uses() if use.node.op_type == "Shape"}
    return len(attentions) if all(node is rewriter.rows.producer() or _start(node) > 0 for node in sizes) else 0


def _over(node: ir.Node, context: set[ir.Value]) -> bool:
    """Whether a node is an attention whose keys, values and bias are the context's, the bias alike at all positions."""
    if node.op_type != "MultiHeadAttention" or not {node.inputs[KEY], node.inputs[VALUE]} <= context:
        return False
    if any(value is not None for i, value in enumerate(node.inputs) if i > VALUE and i != BIAS):
        return False
    if len(node.inputs) <= BIAS or node.inputs[BIAS] is None:
        return True
    wide = _widened(node)
    narrow = wide.inputs[0] if wide is not None else None
    return narrow in context and narrow.shape is not None and len(narrow.shape) == 4 and narrow.shape[2] == 1


def _widened(attention: ir.Node) -> ir.Node | None:
    """What repeats an attention's bias for all positions."""
    bias = attention.inputs[BIAS] if len(attention.inputs) > BIAS else None
    wide = bias.producer() if bias is not None else None
    return wide if wide is not None and wide.op_type == "Expand" else None


def _by_row(context: ir.Value) -> bool:
    """Whether a context has no row of its own for each request on its first axis."""
    return context.shape is None or isinstance(context.shape[0], int)


def _only_for(context: ir.Value, known: set[ir.Node]) -> bool:
    return all(use.node in known or use.node.op_type == "Shape" for use in context.uses())


def _start(shape: ir.Node) -> int:
    start = shape.attributes.get("start")
    return start.as_int() if start is not None else 0


class _Rewriter:
    """rows: the node that tells how many rows the context has."""

    def __init__(self, model: ir.Model, first: ir.Node) -> None:
        self.model = model
        one = first.inputs[KEY]
        self.rows = _before(first, "Shape", [one], "context.rows", start=0, end=1)
        self.merged: dict[int, ir.Value] = {}  # width → the shape of a merged query
        self.wide: dict[ir.Node, ir.Value] = {}  # what repeated a bias → the bias of merged queries

    def rewrite(self, node: ir.Node) -> None:
        query, key, result = node.inputs[0], node.inputs[KEY], node.outputs[0]
        name = str(result.name)
        size = _before(node, "Shape", [query], f"{name}.size")
        merged = _before(node, "Reshape", [query, self._merged_shape(node, key)], f"{name}.merged")
        node.replace_input_with(0, merged)
        wide = _widened(node)
        if wide is not None:
            if wide not in self.wide:
                one = constant(self.model, "context.one", np.array([1], np.int64))
                ones = constant(self.model, "context.ones", np.array([1, 1], np.int64))
                positions = _before(node, "Shape", [merged], f"{name}.positions", start=1, end=2)
                shape = _before(node, "Concat", [ones, positions, one], f"{name}.wide", axis=0)
                self.wide[wide] = _before(node, "Expand", [wide.inputs[0], shape], f"{name}.bias")
            node.replace_input_with(BIAS, self.wide[wide])
        apart = ir.node("Reshape", [result, size], name=f"{name}.apart")
        made = apart.outputs[0]
        made.shape, made.type = result.shape, result.type
        result.replace_all_uses_with(made, replace_graph_outputs=True)
        made.name, result.name, result.shape = name, f"{name}.together", None  # which may be the name of an output
        apart.replace_input_with(0, result)
        assert node.graph is not None
        node.graph.insert_after(node, apart)

    def _merged_shape(self, node: ir.Node, key: ir.Value | None) -> ir.Value:
        assert key is not None
        assert key.shape is not None
        width = int(key.shape[1]) * int(key.shape[3])  # type: ignore[arg-type]
        if width not in self.merged:
            rest = constant(self.model, f"context.width.{width}", np.array([-1, width], np.int64))
            self.merged[width] = _before(node, "Concat", [self.rows, rest], f"context.merged.{width}", axis=0)
        return self.merged[width]


def _before(node: ir.Node, op: str, inputs: list[ir.Value | None], name: str, **attributes: int) -> ir.Value:
    """The output of a new node in front of another."""
    made = ir.node(op, inputs, attributes, name=name)
    made.outputs[0].name = name
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return made.outputs[0]
