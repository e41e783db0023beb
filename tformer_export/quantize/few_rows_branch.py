"""A branch of its own for a step of few rows, which wants other kernels than many rows do.

The whole decode stage is there twice, as the branches of one `If` on the number of new tokens, with all weights outside
it: one `If` costs about 5 µs, one around each product would cost as much as it gains. A copy costs its operators' names
in the file; onnxruntime prepacks a weight that both branches read once (measured: 71 MB resident for four int8 matrices
of 512 × 32000, 72 MB with two readers each), and caches are updated in place through both `If`s.

Inside another `If`, that of the stages, weights have to become the stage's own (`weight_storage.py`), and those
onnxruntime does not give up when it has packed them: 139 MB instead of 66 for a second form of a fourth of the weights,
182 for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant


@dataclass(frozen=True)
class Branches:
    """few: what runs for few new tokens. rows: what runs otherwise. around: the graph of their `If`."""

    few: ir.Graph
    rows: ir.Graph
    around: ir.Graph

    def home(self, graph: ir.Graph, model: ir.Model) -> ir.Graph:
        """Where what a graph's nodes read is made of weights."""
        return self.around if graph in (self.few, self.rows) else model.graph


def graph_of(model: ir.Model, step: str) -> ir.Graph | None:
    """The decode stage: the graph that reads the input `step`. None if none does."""
    tokens = next((value for value in model.graph.inputs if value.name == step), None)
    graphs = [use.node.graph for use in tokens.uses()] if tokens is not None else []
    return graphs[0] if graphs and isinstance(graphs[0], ir.Graph) else None


def branch(model: ir.Model, graph: ir.Graph, step: str, most: int) -> Branches:
    """Put the nodes of the decode stage into the branches of an `If` on whether the input `step`, (batch, new tokens,
    …), holds at most so many tokens, whatever number of features each of them has."""
    tokens = next(value for value in model.graph.inputs if value.name == step)
    outputs = list(graph.outputs)
    many = _move(graph, outputs)
    few = many.clone(allow_outer_scope_values=True)
    few.name = f"{many.name}/few"
    sizes = ir.node("Shape", [tokens], {"start": 0, "end": 2}, name="few.sizes")
    size = ir.node("ReduceProd", [sizes.outputs[0]], {"keepdims": 0}, name="few.tokens")
    limit = constant(model, "few.most", np.array(most, np.int64))
    flag = ir.node("LessOrEqual", [size.outputs[0], limit], name="few.rows")
    for made in (sizes, size, flag):
        made.outputs[0].name = made.name
    branches = {"then_branch": few, "else_branch": many}
    choice = ir.node("If", [flag.outputs[0]], branches, num_outputs=len(outputs), name="few")
    for result, described in zip(choice.outputs, outputs, strict=True):
        result.name, result.shape, result.type = described.name, described.shape, described.type
    graph.extend([sizes, size, flag, choice])
    graph.outputs.extend(choice.outputs)
    for held, prefix in ((few, "few/"), (many, "rows/")):
        values = {value for node in held.all_nodes() for value in node.outputs} if held is few else set(held.outputs)
        for value in values:
            value.name = prefix + str(value.name)
    return Branches(few, many, graph)


def _move(graph: ir.Graph, outputs: list[ir.Value]) -> ir.Graph:
    """A graph of all nodes but those that are made of weights alone, which stay where onnxruntime folds them."""
    stay: set[ir.Value] = set()
    moved = []
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if inputs and all(value in stay or value.is_initializer() for value in inputs):
            stay.update(node.outputs)
        else:
            moved.append(node)
    graph.outputs.clear()
    graph.remove(moved)
    return ir.Graph([], outputs, nodes=moved, opset_imports=graph.opset_imports, name=f"{graph.name}/rows")
