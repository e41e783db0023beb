"""What both programs are made with: nodes of the captured graph copied into a new one, sizes read anew.

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

from tformer_export.analysis.batch_axes import Rows
from tformer_export.analysis.binding_time import Level, is_fixed
from tformer_export.capture.trace import Captured
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import aten, expression, meta
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format import manifest


@dataclass(frozen=True)
class Port:
    """An input or output of a program: its name in the file, and for each axis a size or the name of a free one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Context:
    """A value that encode gives; `one`: for one position of the step input. rows: where it has the batch, if it has
    one."""

    node: Node
    one: bool = False
    rows: Rows | None = None


@dataclass(frozen=True)
class CachedValue:
    """A value of the captured graph whose past is kept: the ports that take and give it, and where it has the batch,
    which the cache has first."""

    past: str
    present: str
    node: Node
    rows: Rows


@dataclass
class Program:
    """One stage. `ragged_chunks` as in the manifest. extras: names of the outputs that are beside its results.
    follows: as of the manifest's `Encode`."""

    module: GraphModule
    inputs: list[Port]
    outputs: list[Port]
    caches: list[CachedValue] = field(default_factory=list)
    ragged_chunks: bool = True
    extras: tuple[str, ...] = ()
    follows: Mapping[str, manifest.Follows] = field(default_factory=dict)


class Emitter:
    """Copies nodes of the captured graph into a new one, with sizes read from that graph's own inputs."""

    def __init__(self, captured: Captured, level: Mapping[Node, Level], values: Mapping[Node, Any]) -> None:
        """values: of every node, at any sizes; only those of constants that are sized by nothing are used."""
        self.captured, self.level, self.values = captured, level, values
        self.longest: int | None = None  # of the step input, where the program knows it
        self.graph, self.root = Graph(), nn.Module()
        self.sizes: dict[sympy.Symbol, tuple[Node, int]] = {}  # symbol → where the new graph reads it
        self.made: dict[Any, Node] = {}
        self.inputs: list[Port] = []
        self.placeholders: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def copied(self, node: Node, args: Any, kwargs: Any) -> Node:
        """The node's operation on other operands, with its line in the user's code."""
        if node.target is aten.reshape.default:
            made = self.graph.call_function(onnx_operators.shaped, (args[0], *args[1]))
        else:
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = {k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta}
        return made

    def input(self, name: str, dtype: torch.dtype, shape: tuple[int | str, ...]) -> Node:
        before = self.placeholders[-1] if self.placeholders else None
        with self.graph.inserting_after(before):  # torch.fx wants placeholders first
            node = self.graph.placeholder(name.replace(".", "_"))
        self.placeholders.append(node)
        self.inputs.append(Port(name, dtype, shape))
        return node

    def rows_first(self, value: Node, axes: tuple[int, ...]) -> Node:
        """With its batch axis, and its time axis if that is given, in front."""
        front = tuple(range(len(axes)))
        return value if axes == front else self.call(onnx_operators.moved, value, axes, front)

    def apart(self, outputs: list[Node]) -> tuple[Node, ...]:
        """The outputs, each a node of its own that is not an input: names of a graph's outputs are one each."""
        given = set(self.placeholders)
        return tuple(
            self.call(aten.clone.default, node) if node in given or node in outputs[:i] else node
            for i, node in enumerate(outputs)
        )

    def constant(self, name: str, value: torch.Tensor) -> Node:
        key = f"constant_{name}"
        if key not in self.made:
            self.root.register_buffer(key, value.detach().contiguous())
            self.made[key] = self.graph.get_attr(key)
        return self.made[key]

    def size(self, size: Any, time: Any) -> Any:
        """A traced size, with `time` standing for the time symbol."""
        return self._size(expression(size), time)

    def _size(self, expr: sympy.Expr, time: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr == self.captured.time:
            return time
        if expr.is_Symbol:
            if expr not in self.sizes:
                raise UnsupportedModelError(f"a size of the step depends on a free axis ({expr}) that it cannot see")
            key = "size", expr
            if key not in self.made:
                self.made[key] = self.call(aten.sym_size.int, *self.sizes[expr])
            return self.made[key]
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
        raise UnsupportedModelError(f"a size of the model is an expression that cannot be exported: {expr}")

    def _is_never_less(self, expr: sympy.Expr) -> bool:
        """Whether a number is so large that no length is larger."""
        return self.longest is not None and bool(expr.is_Integer) and int(expr) >= self.longest

    def constant_value(self, node: Node, time: Any) -> Node:
        """A constant for `time` positions: folded if it is sized by nothing, else computed where it is used."""
        if node.name in self.captured.constants:
            return self.constant(node.name, self.captured.constants[node.name])
        key = node, str(time)
        if key not in self.made:
            if is_fixed(node):
                value = self.values[node]
                if isinstance(value, (list, tuple)):
                    return self._copy(key, node, time)
                self.made[key] = self.constant(node.name, value)
            else:
                self._copy(key, node, time)
        return self.made[key]

    def _copy(self, key: Any, node: Node, time: Any) -> Node:
        def operand(argument: Node) -> Any:
            if isinstance(meta(argument), torch.SymInt):
                return self.size(meta(argument), time)
            return self.constant_value(argument, time)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
        self.made[key] = self.copied(node, args, kwargs)
        return self.made[key]


def axis_names(captured: Captured, value: torch.Tensor) -> tuple[int | str, ...]:
    """The axes of a request input: "batch", a size, or a name for each free length (equal names are equal sizes)."""
    return tuple(_axis_name(captured, size) for size in value.shape)


def _axis_name(captured: Captured, size: Any) -> int | str:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    if expr in captured.batch:
        return manifest.BATCH
    owners = (
        f"{name}_length" if axis == 1 else f"{name}_axis{axis}"
        for name, node in captured.inputs.items()
        for axis, other in enumerate(meta(node).shape)
        if expression(other) == expr
    )
    return next(owners, str(expr))


def context_shape(captured: Captured, context: Context) -> tuple[int | str, ...]:
    """Its axes, the batch's apart from others."""
    shape = tuple(
        1
        if context.one and captured.time is not None and captured.time in expression(size).free_symbols
        else _axis_name(captured, size)
        for size in meta(context.node).shape
    )
    return context.rows.shape(shape, manifest.BATCH) if context.rows and context.rows.times > 1 else shape
