"""Insert the operators of stored forms (`tformer_runtime/format/stored_forms.py`) into a graph."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.passes.weight_bits import describe
from tformer_runtime.format.stored_forms import Constant, Expression, Operator

MAX_NAMED_NUMBERS = 4  # of a constant whose name has its numbers


class FormWriter:
    """Makes nodes and constants of expressions, each once in a graph."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._made: dict[tuple[Hashable, ...], ir.Value] = {}
        self._counts: Counter[str] = Counter()

    def value(
        self,
        graph: ir.Graph,
        expression: Expression,
        values: Mapping[str, ir.Value],
        name: str,
        insert: Callable[[ir.Node], None],
    ) -> ir.Value | None:
        """Return the value of an expression in a graph; None for no input.

        values: name in the expression → value.
        name: the beginning of the names of nodes.
        insert: inserts a new node, behind all nodes that it reads.
        """
        if isinstance(expression, str):
            return values[expression] if expression else None
        if isinstance(expression, Constant):
            return self.constant(expression)
        inputs = [self.value(graph, above, values, name, insert) for above in expression.inputs]
        key = graph, expression.op_type, repr(expression.attributes), *inputs
        if key not in self._made:
            node = self._node(expression, inputs, name)
            insert(node)
            self._made[key] = node.outputs[0]
        return self._made[key]

    def product(
        self,
        graph: ir.Graph,
        expression: Operator,
        values: Mapping[str, ir.Value],
        name: str,
        insert: Callable[[ir.Node], None],
    ) -> list[ir.Node]:
        """Return the nodes of a product from its MatMul operator to its result. Insert those before them alone."""
        nodes: list[ir.Node] = []

        def value(above: Expression) -> ir.Value | None:
            if not isinstance(above, Operator) or not _reads_columns(above):
                return self.value(graph, above, values, name, insert)
            nodes.append(self._node(above, [value(each) for each in above.inputs], name))
            return nodes[-1].outputs[0]

        value(expression)
        return nodes

    def _node(self, expression: Operator, inputs: list[ir.Value | None], name: str) -> ir.Node:
        base = f"{name}.{expression.op_type}"
        self._counts[base] += 1
        if self._counts[base] > 1:
            base = f"{base}.{self._counts[base]}"
        attributes = dict(expression.attributes)
        if expression.domain:
            self.model.graph.opset_imports.setdefault(expression.domain, 1)
        node = ir.node(expression.op_type, inputs, attributes, domain=expression.domain, name=base)
        node.outputs[0].name = base
        return node

    def constant(self, numbers: Constant) -> ir.Value:
        """Return the model's constant with these numbers."""
        text = "x".join(f"{value:.9g}" for value in numbers.values)
        if len(numbers.values) > MAX_NAMED_NUMBERS:
            text = hashlib.sha256(text.encode()).hexdigest()[:8]
        array = np.array(numbers.values, numbers.dtype).reshape(numbers.shape)
        return describe(constant(self.model, f"form.{numbers.dtype}.{len(numbers.shape)}.{text}", array))


def _reads_columns(expression: Expression) -> bool:
    return expression == "columns" or (
        isinstance(expression, Operator) and any(_reads_columns(each) for each in expression.inputs)
    )
