"""Attention over its own past with all scores of a layer at once, where they fit into memory.

onnxruntime 1.31 has two kernels for GroupQueryAttention on the CPU. One goes through the past block by block, in memory
that does not grow with it, and is written for any processor; the other computes all scores first, with the products
that it has for this one. Which runs is chosen by what a node asks for: an attention sink only the second has. So each
node gets a sink that no row ever gives anything to: exp(lowest - maximum) is zero.

Microseconds a layer, one thread of a Xeon (AVX-512), head size 64, with `fold_attention_scale.py`; trust their ratios:

==============  ====  =========  =========  ==========
heads           rows  positions  in blocks  all scores
==============  ====  =========  =========  ==========
8               8     4          26         39
8               8     16         58         57
8               8     40         141        119
12              1     1024       964        633
32, 4 of keys   1     1024       941        553
12, a prompt    1     256        7510       3770
12, a prompt    1     512        25230      12140
==============  ====  =========  =========  ==========

So files of short sequences are left as they are, and in others a step grows by little more than what reading the cache
takes: with 8 rows, 12 layers and 12 heads by 1.0 to 1.2 times that, up to 2000 positions, and by 1.7 times in blocks
(`tests/benchmarks/step_growth.py`).

Scores take rows · heads · new tokens · slots floats. Where a long prompt's would take more than MOST bytes, it runs in
blocks: the branch of an `If` (5 µs), which files have that may come to it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant

SHORT = 64  # the greatest length of a file that is left as it is
MOST = 1 << 28  # bytes of scores
ROWS = 32  # prompts of the greatest length that a file without a branch must have room for
SINK, PAST = 11, 3  # inputs of GroupQueryAttention


def run(model: ir.Model, longest: int) -> int:
    """The number of attentions that compute all scores at once. longest: the maximum length."""
    if longest <= SHORT:
        return 0
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "GroupQueryAttention" and node.inputs[PAST]]
    conditions: dict[tuple[ir.Graph, int], ir.Value] = {}
    for node in nodes:
        heads = node.attributes["num_heads"].as_int()
        sink = constant(model, f"attention.sink.{heads}", np.full(heads, np.finfo(np.float32).min, np.float32))
        if ROWS * heads * longest**2 * 4 > MOST:
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
    """Whether the scores of a step are more than there is room for, computed before its first attention."""
    query, past = node.inputs[0], node.inputs[PAST]
    assert node.graph is not None
    most = constant(model, f"attention.most.{heads}", np.array([MOST // 4 // heads], np.int64))
    sizes = [
        ir.node("Shape", [value], {"start": at, "end": at + 1}) for value, at in ((query, 1), (past, 0), (past, 2))
    ]
    new, rows, slots = (size.outputs[0] for size in sizes)
    tokens = ir.node("Mul", [new, rows])
    scores = ir.node("Mul", [tokens.outputs[0], slots])
    flag = ir.node("Greater", [scores.outputs[0], most])
    made = [*sizes, tokens, scores, flag]
    for i, part in enumerate(made):
        part.name = part.outputs[0].name = f"{node.name}.scores.{i}"
    node.graph.insert_before(node, made)
    return flag.outputs[0]


def _branch(node: ir.Node, too_many: ir.Value, sink: ir.Value) -> None:
    """Put the attention into both branches of an `If`, in one of them with the sink."""
    graph = node.graph
    assert graph is not None
    branches = {}
    for name, branch in (("then_branch", "blocks"), ("else_branch", "scores")):
        inputs = [*node.inputs, *[None] * (SINK + 1 - len(node.inputs))]
        if branch == "scores":
            inputs[SINK] = sink
        own = ir.node(
            node.op_type,
            inputs,
            dict(node.attributes),
            domain=node.domain,
            num_outputs=len(node.outputs),
            name=f"{node.name}.{branch}",
        )
        for made, described in zip(own.outputs, node.outputs, strict=True):
            made.name, made.shape, made.type = f"{described.name}.{branch}", described.shape, described.type
        branches[name] = ir.Graph(
            [], own.outputs, nodes=[own], opset_imports=graph.opset_imports, name=f"{node.name}.{branch}"
        )
    choice = ir.node("If", [too_many], branches, num_outputs=len(node.outputs), name=f"{node.name}.choice")
    graph.insert_before(node, choice)
    for made, before in zip(choice.outputs, node.outputs, strict=True):
        made.name, made.shape, made.type = before.name, before.shape, before.type
        before.name = f"{before.name}.before"
        before.replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(node, safe=True)
