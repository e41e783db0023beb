"""A branch of its own for a step of few rows, which wants other kernels than many rows do.

The whole decode stage is there twice, as the branches of one `If` on the number of new tokens, with all weights outside
it: one `If` costs about 5 µs, one around each product would cost as much as it gains. A copy costs its operators' names
in the file; onnxruntime prepacks a weight that both branches read once (measured: 71 MB resident for four int8 matrices
of 512 × 32000, 72 MB with two readers each), and caches are updated in place through both `If`s.

Inside another `If`, that of the stages, weights have to become the stage's own (`store.py`), and those onnxruntime does
not give up when it has packed them: 139 MB instead of 66 for a second form of a fourth of the weights, 182 for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.constants import constant


@dataclass(frozen=True)
class Branches:
    """few: what runs for few new tokens. rows: what runs otherwise. around: the graph of their `If`."""

    few: ir.Graph
    rows: ir.Graph
    around: ir.Graph

    def home(self, graph: ir.Graph, model: ir.Model) -> ir.Graph:
        """Where what a graph's nodes read is made of weights."""
        return self.around if graph in (self.few, self.rows) else model.graph


def branch(model: ir.Model, step: str, most: int) -> Branches | None:
    """Put the nodes around the input `step`, (batch, new tokens), into the branches of an `If` on whether it holds at
    most so many tokens. None if nothing reads the input."""
    tokens = next((value for value in model.graph.inputs if value.name == step), None)
    uses = list(tokens.uses()) if tokens is not None else []
    graph = uses[0].node.graph if uses else None
    if tokens is None or not isinstance(graph, ir.Graph):
        return None
    outputs = list(graph.outputs)
    many = _move(graph, outputs)
    few = many.clone(allow_outer_scope_values=True)
    few.name = f"{many.name}/few"
    size = ir.node("Size", [tokens], name="few.tokens")
    limit = constant(model, "few.most", np.array(most, np.int64))
    flag = ir.node("LessOrEqual", [size.outputs[0], limit], name="few.rows")
    size.outputs[0].name, flag.outputs[0].name = "few.tokens", "few.rows"
    branches = {"then_branch": few, "else_branch": many}
    choice = ir.node("If", [flag.outputs[0]], branches, num_outputs=len(outputs), name="few")
    for made, described in zip(choice.outputs, outputs, strict=True):
        made.name, made.shape, made.type = described.name, described.shape, described.type
    graph.extend([size, flag, choice])
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
