"""A branch of the decode stage for steps of few rows, which need other kernels than steps of many rows.

The whole decode stage is in the file twice, as the branches of one `If` on the number of new tokens, with all weights
outside it. One `If` is cheap; an `If` around each product would cost as much as it gains. A copy of the stage costs
only its operators' names in the file. onnxruntime packs a weight once for both branches, and caches are updated in
place through both `If`s.

Inside the `If` of the stages, weights have to belong to the stage itself (`weight_storage.py`), and onnxruntime does
not release those after packing them. Figures: docs/design/kernels.md#a-branch-for-few-rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant, copy_description


@dataclass(frozen=True)
class Branches:
    """The two branches of a decode stage.

    few: the graph for few new tokens.
    rows: the graph for all other steps.
    around: the graph that contains their `If`.
    """

    few: ir.Graph
    rows: ir.Graph
    around: ir.Graph

    def home(self, graph: ir.Graph, model: ir.Model) -> ir.Graph:
        """Return the graph in which values that are derived from weights are computed for the nodes of `graph`."""
        return self.around if graph in (self.few, self.rows) else model.graph


def find_decode_graph(model: ir.Model, step: str) -> ir.Graph | None:
    """Return the decode stage, which is the graph that reads the input `step`; None if no graph reads it."""
    tokens = next((value for value in model.graph.inputs if value.name == step), None)
    graphs = [use.node.graph for use in tokens.uses()] if tokens is not None else []
    return graphs[0] if graphs and isinstance(graphs[0], ir.Graph) else None


def branch(model: ir.Model, graph: ir.Graph, step: str, max_tokens: int) -> Branches:
    """Put the nodes of the decode stage into the branches of an `If`, in place.

    step: the graph input (batch, new tokens, …). The branch `few` runs for at most `max_tokens` new tokens in the
        batch, whatever the number of features of each.
    """
    tokens = next(value for value in model.graph.inputs if value.name == step)
    stage_outputs = list(graph.outputs)
    # Empty constants, which stand for the outputs of the other stage, are not results of the `If`.
    outputs = [value for value in stage_outputs if _computes(value)]
    many_rows = _move_nodes(graph, outputs)
    few_rows = many_rows.clone(allow_outer_scope_values=True)
    few_rows.name = f"{many_rows.name}/few"
    sizes = ir.node("Shape", [tokens], {"start": 0, "end": 2}, name="few.sizes")
    size = ir.node("ReduceProd", [sizes.outputs[0]], {"keepdims": 0}, name="few.tokens")
    limit = constant(model, "few.max_tokens", np.array(max_tokens, np.int64))
    flag = ir.node("LessOrEqual", [size.outputs[0], limit], name="few.rows")
    for node in (sizes, size, flag):
        node.outputs[0].name = node.name
    branches = {"then_branch": few_rows, "else_branch": many_rows}
    choice = ir.node("If", [flag.outputs[0]], branches, num_outputs=len(outputs), name="few")
    results = dict(zip(outputs, choice.outputs, strict=True))
    for described, result in results.items():
        copy_description(described, result)
    graph.extend([sizes, size, flag, choice])
    graph.outputs.extend(results.get(value, value) for value in stage_outputs)
    copies = {value for node in few_rows.all_nodes() for value in node.outputs}
    for prefix, values in (("few/", copies), ("rows/", set(many_rows.outputs))):
        for value in values:
            value.name = prefix + str(value.name)
    return Branches(few_rows, many_rows, graph)


def _computes(value: ir.Value) -> bool:
    """Return whether a value is the result of a node with inputs."""
    node = value.producer()
    return node is not None and bool(node.inputs)


def _move_nodes(graph: ir.Graph, outputs: list[ir.Value]) -> ir.Graph:
    """Move the nodes of a graph into a new graph with these outputs.

    Nodes that are computed from weights alone stay, where onnxruntime folds them, and so do further outputs.
    """
    further = set(graph.outputs).difference(outputs)
    constants: set[ir.Value] = set()
    moved = []
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if inputs and all(value in constants or value.is_initializer() for value in inputs):
            constants.update(node.outputs)
        elif further.isdisjoint(node.outputs):
            moved.append(node)
    graph.outputs.clear()
    graph.remove(moved)
    return ir.Graph([], outputs, nodes=moved, opset_imports=graph.opset_imports, name=f"{graph.name}/rows")
