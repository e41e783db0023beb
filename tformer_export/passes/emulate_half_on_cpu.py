"""A model in half precision as the CPU can run it, for the proof where there is no GPU.

Every node that reads or gives numbers in half computes in float32 between casts, so that what it gives is rounded as a
kernel of CUDA rounds it, or becomes infinite as it does there. onnxruntime would refuse a file in bfloat16; of float16
it puts such casts around nodes itself, but drops those between two nodes, so that no number is rounded, nor too large,
from one to the next. (Casts that stand in the file it keeps.) Inputs and outputs stay what they are, and weights are
the same numbers in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tformer_export.passes import remove_unused

_FLOAT, _HALVES = ir.DataType.FLOAT, (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_GIVEN = ("Cast", "Constant", "ConstantOfShape", "Shape", "Size", "If")  # the CPU has them for any type


def run(model: ir.Model) -> int:
    """Rewrite a model of `half` in place; returns how many nodes compute in float32 now. Cost: one pass over them."""
    widening = _Widening(model)
    widening.nodes(model.graph)
    remove_unused.run(model)
    return widening.count


class _Widening:
    def __init__(self, model: ir.Model) -> None:
        self.home = model.graph
        self.count = 0
        self._wide: dict[tuple[ir.Value, ir.Graph], ir.Value] = {}

    def nodes(self, graph: ir.Graph) -> None:
        for node in list(graph):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.nodes(attribute.as_graph())
            if node.op_type not in _GIVEN:
                self._node(graph, node)

    def _node(self, graph: ir.Graph, node: ir.Node) -> None:
        given = [(i, v) for i, v in enumerate(node.inputs) if v is not None and v.dtype in _HALVES]
        made = [v for v in node.outputs if v.dtype in _HALVES]
        for i, value in given:
            node.replace_input_with(i, self._widened(graph, value))
        for value in made:
            self._round(graph, node, value)
        self.count += bool(given or made)

    def _widened(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """In float32: cast once in each graph; a weight is held so."""
        home = self.home if value.const_value is not None else graph
        if (value, home) not in self._wide and value.const_value is not None:
            self._wide[value, home] = self._constant(value)
        elif (value, home) not in self._wide:
            cast = _cast(value, _FLOAT, f"{home.name}/{value.name}.widened")
            producer = value.producer()
            if producer is not None and producer.graph is home:
                home.insert_after(producer, cast)
            else:
                home.insert_before(home[0], cast)
            self._wide[value, home] = cast.outputs[0]
        return self._wide[value, home]

    def _constant(self, value: ir.Value) -> ir.Value:
        held = value.const_value
        assert held is not None
        shape = ir.Shape([size for size in held.shape if isinstance(size, int)])  # all of them are
        wide = ir.LazyTensor(lambda: ir.tensor(held.numpy().astype(np.float32)), _FLOAT, shape)
        made = ir.Value(name=f"{value.name}.widened", shape=value.shape, type=ir.TensorType(_FLOAT), const_value=wide)
        self.home.initializers[str(made.name)] = made
        return made

    def _round(self, graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
        """Have a node give a value in float32, and a cast after it what it gave before."""
        name, half = str(value.name), value.dtype
        assert half is not None
        value.name, value.type = f"{name}.wide", ir.TensorType(_FLOAT)
        cast = _cast(value, half, name)
        made = cast.outputs[0]
        value.replace_all_uses_with(made, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        graph.insert_after(node, cast)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": to}, name=name)
    made = node.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(to), value.shape
    return node
