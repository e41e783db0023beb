"""The two programs: encode, from the request's inputs to context; decode, from new tokens to logits and caches.

Both are graphs of ATen operations and the operators of `tformer_export.operators`, ready for torch.onnx.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from tformer_export import operators
from tformer_export.capture import Captured, arguments, aten, expression, meta, source_line
from tformer_export.staging.levels import Level
from tformer_export.staging.plan import CachedAttention, Plan
from tformer_export.staging.tables import Table
from tformer_export.staging.views import ALL, NEW, ONE, Choice, Roles, Views
from tformer_runtime import manifest
from tformer_runtime.errors import UnsupportedModelError


@dataclass(frozen=True)
class Port:
    """An input or output of a program: its name in the file, and for each axis a size or the name of a free one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass
class Program:
    """One stage. `caches` pairs the indices of an input (past) with an output (present), and says whether they may be
    one buffer. `ragged_chunks` as in the manifest."""

    module: GraphModule
    inputs: list[Port]
    outputs: list[Port]
    caches: list[tuple[int, int, bool]] = field(default_factory=list)
    ragged_chunks: bool = True


class _Emitter:
    """Copies nodes of the captured graph into a new one, with sizes read from that graph's own inputs."""

    def __init__(
        self, captured: Captured, level: Mapping[Node, Level], views: Views | None, values: Mapping[Node, Any]
    ) -> None:
        self.captured, self.level, self.views, self.values = captured, level, views, values
        self.graph, self.root = Graph(), nn.Module()
        self.sizes: dict[sympy.Symbol, tuple[Node, int]] = {}  # symbol → where the new graph reads it
        self.made: dict[Any, Node] = {}
        self.inputs: list[Port] = []
        self.placeholders: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def input(self, name: str, dtype: torch.dtype, shape: tuple[int | str, ...]) -> Node:
        before = self.placeholders[-1] if self.placeholders else None
        with self.graph.inserting_after(before):  # torch.fx wants placeholders first
            node = self.graph.placeholder(name.replace(".", "_"))
        self.placeholders.append(node)
        self.inputs.append(Port(name, dtype, shape))
        return node

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
        folds = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}
        for kind, fold in folds.items():
            if isinstance(expr, kind):
                first, *rest = (self._size(a, time) for a in expr.args)
                for other in rest:
                    both = isinstance(first, int) and isinstance(other, int)
                    first = fold(first, other) if both else self.call(fold, first, other)
                return first
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
            return self._size(sympy.Mul(*[expr.base] * int(expr.exp), evaluate=False), time)
        raise UnsupportedModelError(f"a size of the model is an expression that cannot be exported: {expr}")

    def constant_value(self, node: Node, time: Any) -> Node:
        """A constant for `time` positions: folded if it is sized by nothing, else computed where it is used."""
        if node.name in self.captured.constants:
            return self.constant(node.name, self.captured.constants[node.name])
        key = node, str(time)
        if key not in self.made:
            if _is_fixed(node):
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
        self.made[key] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return self.made[key]


def _is_fixed(node: Node) -> bool:
    """Whether no free size has any part in a constant."""
    seen, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        if isinstance(meta(here), torch.SymInt):
            return False
        todo.extend(here.all_input_nodes)
    return True


class EncodeEmitter(_Emitter):
    """Request inputs → context, or → the outputs of a model that is run once."""

    def emit(self, wanted: list[tuple[Node, bool]], names: list[str]) -> Program:
        captured = self.captured
        for name, node in captured.inputs.items():
            if self.level[node] != Level.REQUEST:
                continue
            shape = axis_names(captured, meta(node))
            self.made[node] = self.input(name, meta(node).dtype, shape)
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self.sizes.setdefault(size.node.expr, (self.made[node], axis))
        needed: set[Node] = set()
        todo = [node for node, _ in wanted]
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo.extend(a for a in node.all_input_nodes if self.level[a] == Level.REQUEST)
        for node in captured.nodes:
            if node in needed and node not in self.made:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._operand)
                self.made[node] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        self.graph.output(tuple(self.made[node] for node, _ in wanted))
        outputs = [
            Port(name, meta(node).dtype, context_shape(captured, node, one))
            for (node, one), name in zip(wanted, names, strict=True)
        ]
        return Program(GraphModule(self.root, self.graph), self.inputs, outputs)

    def _operand(self, argument: Node) -> Any:
        if isinstance(meta(argument), torch.SymInt):
            return self.size(meta(argument), 1)
        if self.level[argument] == Level.CONSTANT:
            return self.constant_value(argument, 1)
        return self.made[argument]


class DecodeEmitter(_Emitter):
    """New tokens, context and caches → logits of the wanted positions, and the caches extended."""

    views: Views

    def emit(
        self, plan: Plan, tables: Mapping[Node, Table], contexts: list[tuple[Node, bool]], names: list[str]
    ) -> Program:
        self.plan, self.tables = plan, tables
        captured = self.captured
        assert captured.step is not None
        assert captured.step_name is not None
        step = captured.step
        tokens = self.input(captured.step_name, meta(step).dtype, (manifest.BATCH, manifest.NEW))
        self.tokens = tokens
        for symbol in captured.batch:
            self.sizes[symbol] = (tokens, 0)
        self.context: dict[tuple[Node, bool], Node] = {}
        for (node, one), name in zip(contexts, names, strict=True):
            self.context[node, one] = self.input(name, meta(node).dtype, context_shape(captured, node, one))
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr != captured.time:
                    self.sizes.setdefault(size.node.expr, (self.context[node, one], axis))
        self.controls: dict[str, Node] = {}
        self.selected = False
        self.outputs: list[tuple[Port, Node]] = []
        self.caches: list[tuple[str, str, bool]] = []
        for node in captured.nodes:
            for roles in plan.demands.get(node, ()):
                self._value(node, roles)
            if node is plan.select:
                self._select(node)
        logits = self.made[captured.output, self.views.roles(captured.output)]
        logits = self._rows_first(captured.output, logits)
        width = meta(captured.output).shape[-1]
        self.outputs.insert(0, (Port("logits", torch.float32, (manifest.BATCH, "wanted", int(width))), logits))
        self.graph.output(tuple(node for _, node in self.outputs))
        inputs = [p.name for p in self.inputs]
        outputs = [p.name for p, _ in self.outputs]
        pairs = [(inputs.index(past), outputs.index(present), place) for past, present, place in self.caches]
        ports = [p for p, _ in self.outputs]
        return Program(GraphModule(self.root, self.graph), self.inputs, ports, pairs, ragged_chunks=not plan.fused)

    # -- values ---------------------------------------------------------------------------------------------------

    def _value(self, node: Node, roles: Roles) -> None:
        if (node, roles) in self.made:
            return
        captured, views = self.captured, self.views
        if node is captured.step and all(role == NEW for _, role in roles):
            self.made[node, roles] = self.tokens
        elif node in views.cuts and roles == ((views.cuts[node], ALL),):
            self._value(node, views.roles(node))
            self.made[node, roles] = self._cached(node)
        elif node in self.plan.fused and all(role == NEW for _, role in roles):
            self.made[node, roles] = self._fused(self.plan.fused[node])
        else:
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            solution = views.solve(node, roles)
            operands = [
                self._operand(node, leaf, choice) if isinstance(leaf, Node) else leaf
                for leaf, choice in zip(leaves, solution.choices, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(operands, spec)
            self.made[node, roles] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def _operand(self, user: Node, leaf: Node, choice: Choice) -> Any:
        if isinstance(meta(leaf), torch.SymInt):
            role = choice[0][1] if isinstance(choice, tuple) else NEW
            return self.size(meta(leaf), self._time(role))
        if self.level[leaf] == Level.CONSTANT:
            if isinstance(choice, tuple):
                return self._gathered(user, leaf, choice)
            return self.constant_value(leaf, self._time(NEW))
        if self.level[leaf] == Level.REQUEST and not isinstance(choice, tuple):
            return self.context[leaf, choice == ONE]
        return self.made[leaf, choice if isinstance(choice, tuple) else ()]

    def _time(self, role: str) -> Node:
        key = "time", role, self.selected and role == NEW
        if key not in self.made:
            if role == ALL:
                source, axis = self._control(manifest.SLOTS), 0
            elif self.selected:
                source, axis = self._control(manifest.SELECT), 1
            else:
                source, axis = self.tokens, 1
            self.made[key] = self.call(aten.sym_size.int, source, axis)
        return self.made[key]

    def _control(self, name: str) -> Node:
        if name not in self.controls:
            dtype, shape = CONTROLS[name]
            self.controls[name] = self.input(name, dtype, shape)
        return self.controls[name]

    def _positions(self) -> Node:
        """The absolute positions of the rows that are being computed."""
        if not self.selected:
            return self._control(manifest.POSITIONS)
        if "selected positions" not in self.made:
            self.made["selected positions"] = self.call(
                torch.gather, self._control(manifest.POSITIONS), 1, self._control(manifest.SELECT)
            )
        return self.made["selected positions"]

    def _select(self, node: Node) -> None:
        roles = self.views.roles(node)
        time, batch = self.views.time_axes(node)[0], self.views.batch_axis(node)
        assert batch is not None
        self.made[node, roles] = self.call(
            operators.take_positions, self.made[node, roles], self._control(manifest.SELECT), batch, time
        )
        self.selected = True

    def _rows_first(self, node: Node, value: Node) -> Node:
        time, batch = self.views.time_axes(node)[0], self.views.batch_axis(node)
        if batch is None or meta(node).dim() != 3 or len(self.views.time_axes(node)) != 1:
            raise UnsupportedModelError(
                f"the model's first output has the shape {tuple(meta(node).shape)}; decoding needs logits of shape "
                "(batch, time, vocabulary)"
            )
        return value if (batch, time) == (0, 1) else self.call(torch.movedim, value, (batch, time), (0, 1))

    # -- tables ---------------------------------------------------------------------------------------------------

    def _gathered(self, user: Node, leaf: Node, roles: Roles) -> Node:
        """A table's part for the new positions of each row, with a batch axis where the user's operation has it."""
        new = [axis for axis, role in roles if role == NEW]
        every = [axis for axis, role in roles if role == ALL]
        if len(new) > 1:
            raise UnsupportedModelError(f"`{leaf.target}` at {source_line(leaf)} is indexed twice by the new position")
        table = self.tables[leaf]
        if not new:  # slots stand at the same position in every row
            result = self.constant(leaf.name, table.values)
            for axis in every:
                result = self.call(operators.slot_view, result, self._control(manifest.SLOTS), axis)
            return result
        batch, missing = self._batch_place(user, leaf, table)
        key = "table", leaf, roles, batch, missing, self.selected
        if key not in self.made:
            axis, name = new[0] + missing, f"{leaf.name}_{missing}_{batch}"
            if every and new[0] < every[0] and (diagonals := table.diagonals(missing, batch)) is not None:
                held = self.constant(name + "_diagonals", diagonals)
                slots = self._control(manifest.SLOTS)
                where = batch, axis, every[0] + missing
                result = self.call(operators.table_diagonals, held, self._positions(), slots, *where)
            else:
                held = self.constant(name + "_rows", table.rows(missing, batch, axis))
                result = self.call(operators.table_rows, held, self._positions(), batch, axis)
                for other in every:
                    result = self.call(operators.slot_view, result, self._control(manifest.SLOTS), other + missing)
            self.made[key] = result
        return self.made[key]

    def _batch_place(self, user: Node, leaf: Node, table: Table) -> tuple[int, int]:
        """(axis that becomes the batch, how many axes of size 1 to put in front first): positions differ from row to
        row, so a table's rows have a batch axis, which has to meet the batch axis of the operation's result."""
        if table.batch_axis is not None:
            return table.batch_axis, 0
        result = meta(user)
        result = result[0] if isinstance(result, (list, tuple)) else result
        rank = table.values.dim()
        for axis, size in enumerate(result.shape):
            if expression(size) in self.captured.batch:
                missing = max(0, result.dim() - axis - rank)
                at = axis - result.dim() + rank + missing
                if missing or (table.values.shape[at] == 1 and at not in table.time_axes):
                    return at, missing
        raise UnsupportedModelError(
            f"`{user.target}` at {source_line(user)} uses a table over positions in a way that leaves no axis for the "
            "rows of a batch, whose positions differ"
        )

    # -- caches ---------------------------------------------------------------------------------------------------

    def _cached(self, node: Node) -> Node:
        """The ALL view of a cut: its new rows written into its cache, and the cache as far as it may be read."""
        views = self.views
        new = self.made[node, views.roles(node)]
        batch, axis = views.batch_axis(node), views.cuts[node]
        assert batch is not None
        if batch != 0:
            new = self.call(torch.movedim, new, batch, 0)
        order = [batch, *(a for a in range(meta(node).dim()) if a != batch)]
        shape = tuple(
            manifest.BATCH if a == batch else manifest.SLOT if a == axis else int(meta(node).shape[a]) for a in order
        )
        past = self._past(meta(node).dtype, shape)
        present = self.call(operators.write_slots, past, new, self._control(manifest.START), shape.index(manifest.SLOT))
        self._present(present, meta(node).dtype, shape)
        view = self.call(operators.slot_view, present, self._control(manifest.SLOTS), shape.index(manifest.SLOT))
        return view if batch == 0 else self.call(torch.movedim, view, 0, batch)

    def _fused(self, attention: CachedAttention) -> Node:
        node, views = attention.node, self.views
        query = arguments(node)[0]
        operands = [self.made[n, views.roles(n)] for n in (query, attention.key, attention.value)]
        bias = None
        if attention.bias is not None:
            table = self.tables.get(attention.bias)
            if table is None or not table.causal_only:  # the operator itself is causal
                solution = views.solve(node, views.roles(node))
                bias = self._operand(node, attention.bias, solution.choices[3])
        pasts = []
        for operand in (attention.key, attention.value):
            shape = (manifest.BATCH, attention.groups, manifest.SLOT, int(meta(operand).shape[3]))
            pasts.append((shape, self._past(meta(operand).dtype, shape)))
        result = self.call(
            operators.grouped_query_attention,
            *operands,
            *(past for _, past in pasts),
            self._control(manifest.LAST),
            self._control(manifest.TOTAL),
            bias,
            float(arguments(node)[4]),
        )
        for i, (shape, _) in enumerate(pasts):
            present = self.call(operator.getitem, result, 1 + i)
            self._present(present, meta(attention.key).dtype, shape, len(pasts) - 1 - i)
        return self.call(operator.getitem, result, 0)

    def _past(self, dtype: torch.dtype, shape: tuple[int | str, ...]) -> Node:
        self.past_count = getattr(self, "past_count", 0) + 1
        return self.input(f"past.{self.past_count - 1}", dtype, shape)

    def _present(self, node: Node, dtype: torch.dtype, shape: tuple[int | str, ...], back: int = 0) -> None:
        index = self.past_count - 1 - back
        self.outputs.append((Port(f"present.{index}", dtype, shape), node))
        self.caches.append((f"past.{index}", f"present.{index}", True))


CONTROLS: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
    manifest.POSITIONS: (torch.int64, (manifest.BATCH, manifest.NEW)),
    manifest.LAST: (torch.int32, (manifest.BATCH,)),
    manifest.TOTAL: (torch.int32, ()),
    manifest.START: (torch.int64, (manifest.BATCH,)),
    manifest.SLOTS: (torch.int64, ("total",)),
    manifest.SELECT: (torch.int64, (manifest.BATCH, "wanted")),
}


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


def context_shape(captured: Captured, node: Node, one: bool) -> tuple[int | str, ...]:
    return tuple(
        1
        if one and captured.time is not None and captured.time in expression(size).free_symbols
        else _axis_name(captured, size)
        for size in meta(node).shape
    )
