"""A branch of its own for one row with one new token, which wants other kernels than many rows do.

The whole decode stage is there twice, as the branches of one `If` on the number of new tokens, with all weights outside
it: one `If` costs about 5 µs, one around each product would cost as much as it gains. A copy costs its operators' names
in the file; onnxruntime prepacks a weight that both branches read once (measured: 71 MB resident for four int8 matrices
of 512 × 32000, 72 MB with two readers each), and caches are updated in place through both `If`s.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Branches:
    """lone: what runs for one row with one token. rows: what runs otherwise. around: the graph of their `If`."""

    lone: ir.Graph
    rows: ir.Graph
    around: ir.Graph

    def home(self, graph: ir.Graph, model: ir.Model) -> ir.Graph:
        """Where what a graph's nodes read is made of weights."""
        return self.around if graph in (self.lone, self.rows) else model.graph


def branch(model: ir.Model, step: str) -> Branches | None:
    """Put the nodes around the input `step`, (batch, new tokens), into the branches of an `If` on whether it holds one
    token. None if nothing reads the input."""
    tokens = next((value for value in model.graph.inputs if value.name == step), None)
    uses = list(tokens.uses()) if tokens is not None else []
    graph = uses[0].node.graph if uses else None
    if tokens is None or not isinstance(graph, ir.Graph):
        return None
    outputs = list(graph.outputs)
    many = _move(graph, outputs)
    lone = many.clone(allow_outer_scope_values=True)
    lone.name = f"{many.name}/lone"
    size = ir.node("Size", [tokens], name="lone.tokens")
    one = ir.Value(name="lone.one", const_value=ir.tensor(1, ir.DataType.INT64, name="lone.one"))
    one.shape, one.dtype = ir.Shape([]), ir.DataType.INT64
    model.graph.initializers["lone.one"] = one
    flag = ir.node("Equal", [size.outputs[0], one], name="lone.row")
    size.outputs[0].name, flag.outputs[0].name = "lone.tokens", "lone.row"
    branches = {"then_branch": lone, "else_branch": many}
    choice = ir.node("If", [flag.outputs[0]], branches, num_outputs=len(outputs), name="lone")
    for made, described in zip(choice.outputs, outputs, strict=True):
        made.name, made.shape, made.type = described.name, described.shape, described.type
    graph.extend([size, flag, choice])
    graph.outputs.extend(choice.outputs)
    for held, prefix in ((lone, "lone/"), (many, "rows/")):
        values = {value for node in held.all_nodes() for value in node.outputs} if held is lone else set(held.outputs)
        for value in values:
            value.name = prefix + str(value.name)
    return Branches(lone, many, graph)


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
