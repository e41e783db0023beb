"""A general program as a module that torch.export can trace."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback

from tformer_export.capture.by_example.recording import InputRef, Slot, StepResult
from tformer_export.capture.by_example.size_fit import SizeExpression, SizePower, WholeParts
from tformer_export.capture.by_example.unify import (
    Call,
    DisagreementError,
    GeneralBody,
    GeneralProgram,
    GeneralStep,
    Slice,
)
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import aten


class RebuiltModule(nn.Module):
    """Runs a program. Operations of a trace of it keep the lines of the user's code.

    max_length: the greatest length for which it is proven; None if no limit was found.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.training = False
        self.max_length: int | None = None

    def forward(self, *inputs: torch.Tensor) -> Any:
        with fx_traceback.preserve_node_meta():
            return Interpreter(self.graph_module).run(*inputs)


def rebuild(program: GeneralProgram, places: Sequence[tuple[int, int]], num_inputs: int) -> RebuiltModule:
    """Return a module that takes the inputs one by one and returns the tuple of outputs.

    places: for each free size, the number of an input and its axis.
    """
    return RebuiltModule(_Builder(places, num_inputs).build(program))


class _Builder:
    def __init__(self, places: Sequence[tuple[int, int]], num_inputs: int) -> None:
        self.graph, self.root = Graph(), nn.Module()
        self.inputs = [self.graph.placeholder(f"input_{i}") for i in range(num_inputs)]
        self.sizes = [self.graph.call_function(aten.sym_size.int, (self.inputs[i], axis)) for i, axis in places]
        self.results: list[Node] = []
        self.attributes: dict[int, tuple[str, Any]] = {}
        self.made: dict[int, tuple[Any, Node]] = {}

    def build(self, program: GeneralProgram) -> GraphModule:
        return self._finish(program.steps, program.outputs)

    def _finish(self, steps: Sequence[GeneralStep], outputs: Sequence[Any]) -> GraphModule:
        for step in steps:
            args, kwargs = self._operand(step.args), self._operand(dict(step.kwargs))
            target = step.target if step.body is None else build_loop(step.body)
            node = self.graph.call_function(target, args, kwargs)
            node.stack_trace = step.stack_trace
            self.results.append(node)
        self.graph.output(tuple(self._operand(list(outputs))))
        return GraphModule(self.root, self.graph)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(entry) for entry in value)
        if isinstance(value, dict):
            return {key: self._operand(entry) for key, entry in value.items()}
        if isinstance(value, StepResult):
            return self.results[value.number]
        if isinstance(value, (InputRef, Slot)):
            return self.inputs[value.number]
        if isinstance(value, (SizeExpression, SizePower, torch.Tensor, Call, Slice)):
            if id(value) not in self.made:
                self.made[id(value)] = value, self._make(value)
            return self.made[id(value)][1]
        return value

    def _make(self, value: Any) -> Node:
        if isinstance(value, torch.Tensor):
            return self._attribute(value)
        if isinstance(value, SizeExpression):
            computed: Node = self._size(value)
            return computed
        if isinstance(value, SizePower):
            return self.graph.call_function(operator.pow, (self._operand(value.base), value.exponent))
        if isinstance(value, Slice):
            node = self._attribute(value.table)
            for axis, size in enumerate(value.shape):
                if size.terms:
                    node = self.graph.call_function(aten.slice.Tensor, (node, axis, 0, self._operand(size)))
            return node
        return self.graph.call_function(value.target, self._operand(value.args), self._operand(dict(value.kwargs)))

    def _attribute(self, value: torch.Tensor) -> Node:
        if id(value) not in self.attributes:
            name = f"constant_{len(self.attributes)}"
            self.attributes[id(value)] = name, value
            if isinstance(value, nn.Parameter):
                self.root.register_parameter(name, value)
            else:
                self.root.register_buffer(name, value)
        return self.graph.get_attr(self.attributes[id(value)][0])

    def _size(self, value: SizeExpression) -> Any:
        total: Any = value.offset
        for factor, monomial in value.terms:
            term: Any = self._factor(monomial[0])
            for part in monomial[1:]:
                term = self.graph.call_function(operator.mul, (term, self._factor(part)))
            term = term if factor == 1 else self.graph.call_function(operator.mul, (term, factor))
            total = term if total == 0 else self.graph.call_function(operator.add, (term, total))
        return total if value.divisor == 1 else self.graph.call_function(operator.floordiv, (total, value.divisor))

    def _factor(self, part: int | WholeParts) -> Any:
        if not isinstance(part, WholeParts):
            return self._free_size(part)
        size = self._free_size(part.number)
        if part.offset:
            size = self.graph.call_function(operator.add, (size, part.offset))
        return self.graph.call_function(operator.floordiv, (size, part.divisor))

    def _free_size(self, number: int) -> Any:
        return self.sizes[number]


class _BodyBuilder(_Builder):
    """Builds the body of a loop. The free sizes are read from the shapes of its operands."""

    def __init__(self, body: GeneralBody) -> None:
        super().__init__([], len(body.shapes))
        self.body = body
        self.free: dict[int, Any] = {}

    def _free_size(self, number: int) -> Any:
        if number not in self.free:
            self.free[number] = self._read_size(number)
        return self.free[number]

    def _read_size(self, number: int) -> Any:
        for i, shape in enumerate(self.body.shapes):
            for axis, size in enumerate(shape):
                if len(size.terms) == 1 and size.terms[0][1] == (number,) and not size.offset and size.divisor == 1:
                    read = self.graph.call_function(aten.sym_size.int, (self.inputs[i], axis))
                    factor = size.terms[0][0]
                    return read if factor == 1 else self.graph.call_function(operator.floordiv, (read, factor))
        raise DisagreementError("a loop needs a size that none of its values has", None)


def build_loop(body: GeneralBody) -> Scan:
    """Return the operation of a loop over positions."""
    module = _BodyBuilder(body)._finish(body.steps, body.outputs)
    return Scan(module, body.num_states, body.num_sequences)
