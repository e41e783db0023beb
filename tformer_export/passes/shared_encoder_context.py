"""Let several rows of a step share one row of the context, so that beams read the keys and values of their source once.

A query has the shape (C · G, N, width): C contexts with G neighbouring rows each. Reshaped to (C, G · N, width), it is
C queries of G · N positions, the same numbers in the same order. So the context may have C rows where the step input
has C · G, for any G. With G = 1 the pass only adds two reshapes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, replace_value
from tformer_export.passes import remove_unused
from tformer_export.staging.emitter import CONTEXT

KEY, VALUE, BIAS = 1, 2, 5  # inputs of MultiHeadAttention


def run(model: ir.Model) -> int:
    """Rewrite all attentions over the context in place, and return how many there are.

    Change nothing and return 0 if anything else reads the context row by row.
    """
    context = {v for v in model.graph.inputs if (v.name or "").startswith(CONTEXT)}
    attentions = [node for node in model.graph.all_nodes() if _reads_context(node, context)]
    readers = {*attentions, *(expansion for node in attentions if (expansion := _bias_expansion(node)) is not None)}
    if not attentions or any(_is_fixed_size(value) or not _read_only_by(value, readers) for value in context):
        return 0
    rewriter = _ContextRewriter(model, attentions[0])
    for node in attentions:
        rewriter.rewrite(node)
    remove_unused.run(model)
    sizes = {use.node for value in context for use in value.uses() if use.node.op_type == "Shape"}
    return len(attentions) if all(node is rewriter.rows.producer() or _start(node) > 0 for node in sizes) else 0


def _reads_context(node: ir.Node, context: set[ir.Value]) -> bool:
    """Return whether a node is an attention over keys, values and a bias of the context alone.

    The bias must be the same for all positions of the query.
    """
    if node.op_type != "MultiHeadAttention" or not {node.inputs[KEY], node.inputs[VALUE]} <= context:
        return False
    if any(value is not None for i, value in enumerate(node.inputs) if i > VALUE and i != BIAS):
        return False
    if len(node.inputs) <= BIAS or node.inputs[BIAS] is None:
        return True
    expansion = _bias_expansion(node)
    bias = expansion.inputs[0] if expansion is not None else None
    return bias in context and bias.shape is not None and len(bias.shape) == 4 and bias.shape[2] == 1


def _bias_expansion(attention: ir.Node) -> ir.Node | None:
    """Return the node that repeats an attention's bias for all positions, if there is one."""
    bias = attention.inputs[BIAS] if len(attention.inputs) > BIAS else None
    expansion = bias.producer() if bias is not None else None
    return expansion if expansion is not None and expansion.op_type == "Expand" else None


def _is_fixed_size(context: ir.Value) -> bool:
    """Return whether the first axis of a context has a fixed size, so that it has no row for each request."""
    return context.shape is None or isinstance(context.shape[0], int)


def _read_only_by(context: ir.Value, readers: set[ir.Node]) -> bool:
    return all(use.node in readers or use.node.op_type == "Shape" for use in context.uses())


def _start(shape: ir.Node) -> int:
    start = shape.attributes.get("start")
    return start.as_int() if start is not None else 0


class _ContextRewriter:
    """Rewrites attentions. rows: the number of rows of the context, computed in the graph."""

    def __init__(self, model: ir.Model, first: ir.Node) -> None:
        self.model = model
        self.rows = _insert_before(first, "Shape", [first.inputs[KEY]], "context.rows", start=0, end=1)
        self.merged_shapes: dict[int, ir.Value] = {}  # width → the shape of a merged query
        self.biases: dict[ir.Node, ir.Value] = {}  # old expansion of a bias → the bias of merged queries

    def rewrite(self, node: ir.Node) -> None:
        """Merge the rows of an attention's query that share a context, and split the rows of its result again."""
        query, key, result = node.inputs[0], node.inputs[KEY], node.outputs[0]
        name = str(result.name)
        size = _insert_before(node, "Shape", [query], f"{name}.size")
        merged = _insert_before(node, "Reshape", [query, self._merged_shape(node, key)], f"{name}.merged")
        node.replace_input_with(0, merged)
        expansion = _bias_expansion(node)
        if expansion is not None:
            if expansion not in self.biases:
                one = constant(self.model, "context.one", np.array([1], np.int64))
                ones = constant(self.model, "context.ones", np.array([1, 1], np.int64))
                positions = _insert_before(node, "Shape", [merged], f"{name}.positions", start=1, end=2)
                shape = _insert_before(node, "Concat", [ones, positions, one], f"{name}.wide", axis=0)
                self.biases[expansion] = _insert_before(node, "Expand", [expansion.inputs[0], shape], f"{name}.bias")
            node.replace_input_with(BIAS, self.biases[expansion])
        restored = ir.node("Reshape", [result, size], name=f"{name}.apart")
        replace_value(result, restored.outputs[0], f"{name}.together")
        result.shape = None
        restored.replace_input_with(0, result)  # which the replacement changed too
        assert node.graph is not None
        node.graph.insert_after(node, restored)

    def _merged_shape(self, node: ir.Node, key: ir.Value | None) -> ir.Value:
        assert key is not None
        assert key.shape is not None
        width = int(key.shape[1]) * int(key.shape[3])  # type: ignore[arg-type]
        if width not in self.merged_shapes:
            rest = constant(self.model, f"context.width.{width}", np.array([-1, width], np.int64))
            self.merged_shapes[width] = _insert_before(
                node, "Concat", [self.rows, rest], f"context.merged.{width}", axis=0
            )
        return self.merged_shapes[width]


def _insert_before(node: ir.Node, op: str, inputs: list[ir.Value | None], name: str, **attributes: int) -> ir.Value:
    """Insert a new node before another, and return its output."""
    new_node = ir.node(op, inputs, attributes, name=name)
    new_node.outputs[0].name = name
    assert node.graph is not None
    node.graph.insert_before(node, new_node)
    return new_node.outputs[0]
