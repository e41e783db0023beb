"""Common parts of both programs: nodes of the captured graph are copied into a new graph, with sizes read there.

A program is a graph of ATen operations and the operators of `tformer_export.common.onnx_operators`, ready for
torch.onnx.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.analysis.binding_time import Level, is_fixed
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import aten, expression, meta, origin
from tformer_export.common.source_lines import size_words
from tformer_export.staging.layouts import PLAIN, Layout
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format import manifest

MAX_POSITIONS = 1 << 24  # of an input of a single-pass model, whose length is not limited
CONTEXT = "context."  # prefix of the decode inputs for the context
ENCODED = ".encoded"  # suffix of an encode output; its stem is the name of the decode input that it becomes


@dataclass(frozen=True)
class Port:
    """An input or output of a program.

    name: its name in the file.
    shape: for each axis a size, or the name of a free size.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ContextTensor:
    """A value that encode computes for decode.

    one: whether it is computed for one position of the step input only.
    rows: the axis of the batch, if it has one.
    """

    node: Node
    one: bool = False
    rows: BatchAxis | None = None


@dataclass(frozen=True)
class CachedValue:
    """A value of the captured graph whose past is cached.

    past, present: the input and the output for the cache.
    rows: the axis of the batch, which is the first axis of the cache.
    time: the time axis of the value, and `layout`, its layout.
    num_carried: the number of rows of a carry, the last ones so far; None for a cache of all positions.
    state: the number of the result that a carry holds, for a loop over positions that returns its last states.
    """

    past: str
    present: str
    node: Node
    rows: BatchAxis
    time: int
    layout: Layout = PLAIN
    num_carried: int | None = None
    state: int | None = None

    @property
    def is_carry(self) -> bool:
        return self.num_carried is not None or self.state is not None


@dataclass
class Program:
    """The program of one stage.

    extras: the names of the extra outputs.
    chunked_prefill, derived_lengths: as in the manifest.
    """

    module: GraphModule
    inputs: list[Port]
    outputs: list[Port]
    caches: list[CachedValue] = field(default_factory=list)
    chunked_prefill: bool = True
    extras: tuple[str, ...] = ()
    derived_lengths: Mapping[str, manifest.DerivedLength] = field(default_factory=dict)


class Emitter:
    """Copies nodes of the captured graph into a new graph, with sizes read from the new graph's own inputs."""

    def __init__(self, captured: CapturedGraph, level: Mapping[Node, Level], values: Mapping[Node, Any]) -> None:
        """Make an empty program.

        values: the value of every node, at any sizes; only constants without free sizes are read from it.
        """
        self.captured, self.level, self.values = captured, level, values
        self.max_length: int | None = None  # of the step input, if the program knows it
        self.graph, self.root = Graph(), nn.Module()
        self.sizes: dict[sympy.Symbol, tuple[Node, int]] = {}  # symbol → where the new graph reads it
        self.emitted: dict[Any, Node] = {}
        self.inputs: list[Port] = []
        self.placeholders: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def copy(self, node: Node, args: Any, kwargs: Any) -> Node:
        """Add the operation of a node with other operands; it keeps its line in the user's code."""
        if node.target is aten.reshape.default:
            copy = self.graph.call_function(onnx_operators.view_as_shape, (args[0], *args[1]))
        elif node.target is aten.split.Tensor and not isinstance(args[1], int) and _has_equal_parts(node):
            # torch.onnx fails if the size of the parts is not a number, as in x.split(batch, 0).
            copy = self.call(onnx_operators.equal_parts, args[0], len(meta(node)), *args[2:])
        elif node.target is aten.logcumsumexp.default:
            copy = self.call(onnx_operators.running_logsumexp, *args, self.max_length or MAX_POSITIONS)
        else:
            copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.meta = origin(node)
        return copy

    def input(self, name: str, dtype: torch.dtype, shape: tuple[int | str, ...]) -> Node:
        """Add an input to the program."""
        before = self.placeholders[-1] if self.placeholders else None
        with self.graph.inserting_after(before):  # torch.fx wants placeholders first
            node = self.graph.placeholder(name.replace(".", "_"))
        self.placeholders.append(node)
        self.inputs.append(Port(name, dtype, shape))
        return node

    def move_rows_first(self, value: Node, axes: tuple[int, ...]) -> Node:
        """Move the batch axis, and the time axis if it is given, to the front."""
        front = tuple(range(len(axes)))
        return value if axes == front else self.call(onnx_operators.move_axes, value, axes, front)

    def distinct_outputs(self, outputs: list[Node]) -> tuple[Node, ...]:
        """Return the outputs as distinct nodes that are not inputs: each output of a graph needs its own name."""
        placeholders = set(self.placeholders)
        return tuple(
            self.call(aten.clone.default, node) if node in placeholders or node in outputs[:i] else node
            for i, node in enumerate(outputs)
        )

    def constant(self, name: str, value: torch.Tensor) -> Node:
        """Return a constant of the program, added at the first call for this name."""
        key = f"constant_{name}"
        if key not in self.emitted:
            self.root.register_buffer(key, value.detach().contiguous())
            self.emitted[key] = self.graph.get_attr(key)
        return self.emitted[key]

    def size(self, size: Any, time: Any) -> Any:
        """Return a traced size; `time` replaces the time symbol."""
        return self._size(expression(size), time)

    def _size(self, expr: sympy.Expr, time: Any) -> Any:
        """Return a size expression as a number or as a node that computes it."""
        if expr.is_Integer:
            return int(expr)
        if expr == self.captured.time:
            return time
        if expr.is_Symbol:
            if expr not in self.sizes:
                raise UnsupportedModelError(
                    f"a size of the step follows from {self._words(expr)}, which a step does not know: compute it from "
                    "the sizes of the step input"
                )
            key = "size", expr
            if key not in self.emitted:
                self.emitted[key] = self.call(aten.sym_size.int, *self.sizes[expr])
            return self.emitted[key]
        folds: dict[Any, Callable[..., Any]] = {
            sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv,
            Mod: operator.mod, PythonMod: operator.mod, Min: torch.sym_min, Max: torch.sym_max,
        }  # fmt: skip
        for kind, fold in folds.items():
            if isinstance(expr, kind):
                parts = [a for a in expr.args if not (kind is Min and self._is_never_less(a))]
                first, *rest = (self._size(a, time) for a in parts or expr.args)
                for other in rest:
                    both = isinstance(first, int) and isinstance(other, int)
                    first = fold(first, other) if both else self.call(fold, first, other)
                return first
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
            return self._size(sympy.Mul(*[expr.base] * int(expr.exp), evaluate=False), time)
        raise UnsupportedModelError(f"a size of the model is an expression that no file can hold: {self._words(expr)}")

    def _words(self, expr: sympy.Expr) -> str:
        return size_words(expr, self.captured.size_names)

    def _is_never_less(self, expr: sympy.Expr) -> bool:
        """Return whether a number is at least the maximum length."""
        return self.max_length is not None and bool(expr.is_Integer) and int(expr) >= self.max_length

    def constant_value(self, node: Node, time: Any) -> Node:
        """Return a constant for `time` positions: folded if it has no free sizes, else computed in the program."""
        if node.name in self.captured.constants:
            return self.constant(node.name, self.captured.constants[node.name])
        key = node, str(time)
        if key not in self.emitted:
            if is_fixed(node):
                value = self.values[node]
                if isinstance(value, (list, tuple)):
                    return self._copy_constant(key, node, time)
                self.emitted[key] = self.constant(node.name, value)
            else:
                self._copy_constant(key, node, time)
        return self.emitted[key]

    def _copy_constant(self, key: Any, node: Node, time: Any) -> Node:
        def operand(argument: Node) -> Any:
            if isinstance(meta(argument), torch.SymInt):
                return self.size(meta(argument), time)
            return self.constant_value(argument, time)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        self.emitted[key] = self.copy(node, args, kwargs)
        return self.emitted[key]


def _has_equal_parts(split: Node) -> bool:
    """Return whether all parts of a split have one size."""
    _, size, *axis = split.args
    whole = meta(split.all_input_nodes[0]).shape[axis[0] if axis else 0]
    return bool(expression(whole) == len(meta(split)) * expression(meta(size) if isinstance(size, Node) else size))


def axis_names(captured: CapturedGraph, value: torch.Tensor) -> tuple[int | str, ...]:
    """Return the axes of a request input: "batch", a size, or a name for each free length.

    Equal names are equal sizes. Lengths that forward needs equal have one name, and one size in the trace.
    """
    return tuple(_axis_name(captured, size) for size in value.shape)


def _axis_name(captured: CapturedGraph, size: Any) -> int | str:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    if expr in captured.batch:
        return manifest.BATCH_AXIS
    places = [(name, axis) for name, node in captured.inputs.items() for axis in range(1, meta(node).dim())]
    traced = {
        captured.example[name].shape[axis]
        for name, axis in places
        if expression(meta(captured.inputs[name]).shape[axis]) == expr
    }
    owners = (
        f"{name}_length" if axis == 1 else f"{name}_axis{axis}"
        for name, axis in places
        if captured.example[name].shape[axis] in traced
        and expression(meta(captured.inputs[name]).shape[axis]).is_Symbol
    )
    return next(owners, str(expr))


def context_shape(captured: CapturedGraph, context: ContextTensor) -> tuple[int | str, ...]:
    """Return the axes of a context; the batch axis is not merged with others."""
    shape = tuple(
        1
        if context.one and captured.time is not None and captured.time in expression(size).free_symbols
        else _axis_name(captured, size)
        for size in meta(context.node).shape
    )
    return context.rows.shape(shape, manifest.BATCH_AXIS) if context.rows and context.rows.times > 1 else shape
