"""Run the captured graph on numbers: all of it at small sizes, or the constants alone at any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import Captured
from tformer_export.common.fx_nodes import expression, is_counted, meta


def run(captured: Captured, inputs: Mapping[str, torch.Tensor]) -> dict[Node, Any]:
    """Every value of the graph for these inputs. Memory is that of all activations: keep the sizes small."""
    values: dict[Node, Any] = {}
    by_node = {node: inputs[name] for name, node in captured.inputs.items()}
    with torch.no_grad():
        for node in captured.nodes:
            if node.op == "placeholder":
                values[node] = by_node[node] if node in by_node else captured.constants[node.name]
            elif node.op == "call_function":
                values[node] = call(node, lambda n: values[n])
    return values


def call(node: Node, operand: Callable[[Node], Any]) -> Any:
    """The node's operation on other operands."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Constants:
    """Values of constant nodes with the sizes' symbols set at will.

    Only a constant's own ancestors are computed, and freed when they are no longer needed. Cost: the constant part of
    the graph once for each set of sizes.
    """

    def __init__(self, captured: Captured, level: Mapping[Node, Level]) -> None:
        self.captured, self.level = captured, level

    def at(self, nodes: list[Node], sizes: Mapping[sympy.Symbol, int]) -> dict[Node, Any]:
        """The values of `nodes`, all constant, with each symbol at its size."""
        known: dict[Node, Any] = {}
        wanted = set(nodes)
        uses = dict.fromkeys(self.ancestors(nodes), 0)
        for node in uses:
            for argument in node.all_input_nodes:
                if argument in uses:
                    uses[argument] += 1
        with torch.no_grad():
            for node in self.captured.nodes:
                if node not in uses:
                    continue
                known[node] = self._value(node, known, sizes)
                for argument in node.all_input_nodes:  # free what is no longer needed
                    if argument in uses:
                        uses[argument] -= 1
                        if uses[argument] == 0 and argument not in wanted:
                            known.pop(argument, None)
        return {n: known[n] for n in nodes}

    def ancestors(self, nodes: list[Node]) -> set[Node]:
        seen: set[Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in seen or self.level[node] != Level.CONSTANT:
                continue
            seen.add(node)
            if not isinstance(meta(node), torch.SymInt) or is_counted(node):
                todo.extend(node.all_input_nodes)
        return seen

    def _value(self, node: Node, known: Mapping[Node, Any], sizes: Mapping[sympy.Symbol, int]) -> Any:
        value = meta(node)
        if isinstance(value, torch.SymInt) and not is_counted(node):
            return size_of(value, sizes)
        if node.op == "placeholder":
            return self.captured.constants[node.name]

        return call(node, lambda argument: known[argument])


def size_of(size: Any, sizes: Mapping[sympy.Symbol, int]) -> int:
    return int(expression(size).subs(sizes))
