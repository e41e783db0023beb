"""Evaluation of the captured graph on numbers: all of it at small sizes, or the constants alone at any length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import expression, is_read_from_data, meta
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK


def run(
    captured: CapturedGraph, inputs: Mapping[str, torch.Tensor], replaced: Mapping[Node, torch.Tensor] | None = None
) -> dict[Node, Any]:
    """Return every value of the graph for these inputs. Memory: that of all activations, so keep the sizes small.

    replaced: values that stand in the place of those of their nodes.
    """
    values: dict[Node, Any] = {}
    by_node = {node: inputs[name] for name, node in captured.inputs.items()}
    with TORCH_PATCH_LOCK, torch.no_grad():  # the graph has custom operators
        for node in captured.nodes:
            if replaced is not None and node in replaced:
                values[node] = replaced[node]
            elif node.op == "placeholder":
                values[node] = by_node[node] if node in by_node else captured.constants[node.name]
            elif node.op == "call_function":
                values[node] = call(node, lambda n: values[n])
    return values


def call(node: Node, operand: Callable[[Node], Any]) -> Any:
    """Call the operation of a node with other operands."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Constants:
    """Values of constant nodes at any sizes.

    Only the ancestors of a constant are computed, and they are freed after their last use. Cost: the constant part of
    the graph for each set of sizes.
    """

    def __init__(
        self, captured: CapturedGraph, level: Mapping[Node, Level], fills: Mapping[Node, bool] | None = None
    ) -> None:
        """Make an evaluator. fills: tensors that hold one answer everywhere, and count as constants."""
        self.captured, self.level, self.fills = captured, level, fills or {}

    def at(self, nodes: list[Node], sizes: Mapping[sympy.Symbol, int]) -> dict[Node, Any]:
        """Return the values of constant nodes, with each size symbol replaced."""
        values: dict[Node, Any] = {}
        results = set(nodes)
        uses = dict.fromkeys(self.ancestors(nodes), 0)
        for node in uses:
            for argument in node.all_input_nodes:
                if argument in uses:
                    uses[argument] += 1
        with torch.no_grad():
            for node in self.captured.nodes:
                if node not in uses:
                    continue
                values[node] = self._value(node, values, sizes)
                for argument in node.all_input_nodes:  # free values after their last use
                    if argument in uses:
                        uses[argument] -= 1
                        if uses[argument] == 0 and argument not in results:
                            values.pop(argument, None)
        return {n: values[n] for n in nodes}

    def at_length(self, node: Node, length: int) -> torch.Tensor:
        """Return the value of a constant node for this length of the step input, with 2 for every other size."""
        symbols: set[sympy.Symbol] = {
            symbol
            for sized in (*self.captured.inputs.values(), node)
            for size in meta(sized).shape
            for symbol in expression(size).free_symbols
        }
        sizes = {**dict.fromkeys(symbols, 2), self.captured.time: length}
        value: torch.Tensor = self.at([node], sizes)[node]
        return value

    def ancestors(self, nodes: list[Node]) -> set[Node]:
        """Return the nodes from which these constants are computed, with the constants themselves."""
        visited: set[Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in visited or self.level[node] != Level.CONSTANT:
                continue
            visited.add(node)
            if node in self.fills:
                continue
            if not isinstance(meta(node), torch.SymInt) or is_read_from_data(node):
                pending.extend(node.all_input_nodes)
        return visited

    def _value(self, node: Node, known: Mapping[Node, Any], sizes: Mapping[sympy.Symbol, int]) -> Any:
        value = meta(node)
        if isinstance(value, torch.SymInt) and not is_read_from_data(node):
            return size_of(value, sizes)
        if node.op == "placeholder":
            return self.captured.constants[node.name]
        if node in self.fills:
            return torch.full([size_of(size, sizes) for size in value.shape], self.fills[node])
        return call(node, lambda argument: known[argument])


def size_of(size: Any, sizes: Mapping[sympy.Symbol, int]) -> int:
    return int(expression(size).subs(sizes))
