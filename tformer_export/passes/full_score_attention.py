"""Let attention over its own past compute all scores of a layer at once, where they fit into memory.

onnxruntime 1.31 has two CPU kernels for GroupQueryAttention. One goes through the past block by block, with memory that
does not grow with the past. The other computes all scores first, with the fast matrix products of this processor; it is
the only one that supports attention sinks. So each node gets a sink that no row gives any weight to: exp(lowest −
maximum) is zero.

All scores at once are faster for long sequences and slower for short ones, so files of short sequences stay as they
are. Figures: docs/design/kernels.md#all-scores-at-once.

Scores take rows · heads · new tokens · slots floats. A step whose scores would take more than MAX_SCORE_BYTES runs
block by block, in a branch of an `If`. Files that cannot reach this size have no branch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, copy_description, replace_node

MAX_SHORT_TOKENS = 64  # a file with at most this maximum length is not changed
MAX_SCORE_BYTES = 1 << 28  # of one layer
UNBRANCHED_ROWS = 32  # a file has no branch if the scores of this many prompts of maximum length fit
SINK, PAST = 11, 3  # inputs of GroupQueryAttention


def run(model: ir.Model, max_length: int) -> int:
    """Rewrite attentions in place, and return the number of attentions that can compute all scores at once.

    max_length: the maximum length of the step input, in tokens.
    """
    if max_length <= MAX_SHORT_TOKENS:
        return 0
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "GroupQueryAttention" and node.inputs[PAST]]
    conditions: dict[tuple[ir.Graph, int], ir.Value] = {}
    for node in nodes:
        heads = node.attributes["num_heads"].as_int()
        sink = constant(model, f"attention.sink.{heads}", np.full(heads, np.finfo(np.float32).min, np.float32))
        if UNBRANCHED_ROWS * heads * max_length**2 * 4 > MAX_SCORE_BYTES:
            graph = node.graph
            assert isinstance(graph, ir.Graph)
            if (graph, heads) not in conditions:
                conditions[graph, heads] = _too_many(model, node, heads)
            _branch(node, conditions[graph, heads], sink)
        else:
            node.resize_inputs(max(len(node.inputs), SINK + 1))
            node.replace_input_with(SINK, sink)
    return len(nodes)


def _too_many(model: ir.Model, node: ir.Node, heads: int) -> ir.Value:
    """Return whether the scores of a step exceed MAX_SCORE_BYTES, computed before the first attention of a graph."""
    query, past = node.inputs[0], node.inputs[PAST]
    assert node.graph is not None
    limit = np.array([MAX_SCORE_BYTES // 4 // heads], np.int64)
    max_values = constant(model, f"attention.max_values.{heads}", limit)
    sizes = [
        ir.node("Shape", [value], {"start": at, "end": at + 1}) for value, at in ((query, 1), (past, 0), (past, 2))
    ]
    new, rows, slots = (size.outputs[0] for size in sizes)
    tokens = ir.node("Mul", [new, rows])
    scores = ir.node("Mul", [tokens.outputs[0], slots])
    flag = ir.node("Greater", [scores.outputs[0], max_values])
    new_nodes = [*sizes, tokens, scores, flag]
    for i, part in enumerate(new_nodes):
        part.name = part.outputs[0].name = f"{node.name}.scores.{i}"
    node.graph.insert_before(node, new_nodes)
    return flag.outputs[0]


def _branch(node: ir.Node, too_many: ir.Value, sink: ir.Value) -> None:
    """Put the attention into both branches of an `If`; the attention of the else branch has the sink."""
    graph = node.graph
    assert graph is not None
    branches = {}
    for name, branch in (("then_branch", "blocks"), ("else_branch", "scores")):
        inputs = [*node.inputs, *[None] * (SINK + 1 - len(node.inputs))]
        if branch == "scores":
            inputs[SINK] = sink
        copy = ir.node(
            node.op_type,
            inputs,
            dict(node.attributes),
            domain=node.domain,
            num_outputs=len(node.outputs),
            name=f"{node.name}.{branch}",
        )
        for output, described in zip(copy.outputs, node.outputs, strict=True):
            copy_description(described, output)
            output.name = f"{described.name}.{branch}"
        branches[name] = ir.Graph(
            [], copy.outputs, nodes=[copy], opset_imports=graph.opset_imports, name=f"{node.name}.{branch}"
        )
    choice = ir.node("If", [too_many], branches, num_outputs=len(node.outputs), name=f"{node.name}.choice")
    replace_node(node, [choice])
