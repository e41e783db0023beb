"""The decode program: new tokens, context and caches → logits of the wanted positions, and the caches extended."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.batch_axes import Rows, times_batch
from tformer_export.analysis.binding_time import Level
from tformer_export.capture.trace import Captured
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import arguments, aten, meta, source_line
from tformer_export.staging.auxiliary_outputs import Extra
from tformer_export.staging.emitter import CachedValue, Context, Emitter, Port, Program, context_shape
from tformer_export.staging.plan import CachedAttention, Plan
from tformer_export.staging.restriction import ALL, NEW, ONE, Choice, Roles, Views
from tformer_export.staging.rotary import Rotation
from tformer_export.staging.tables import Table, is_causal_alone
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format import manifest

CONTROLS: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
    manifest.POSITIONS: (torch.int64, (manifest.BATCH, manifest.NEW)),
    manifest.LAST: (torch.int32, (manifest.BATCH,)),
    manifest.TOTAL: (torch.int32, ()),
    manifest.START: (torch.int64, (manifest.BATCH,)),
    manifest.SLOTS: (torch.int64, ("total",)),
    manifest.SELECT: (torch.int64, (manifest.BATCH, manifest.WANTED)),
}


class DecodeEmitter(Emitter):
    """New tokens, context and caches → logits of the wanted positions, and the caches extended."""

    def __init__(
        self,
        captured: Captured,
        level: Mapping[Node, Level],
        values: Mapping[Node, Any],
        views: Views,
        plan: Plan,
        tables: Mapping[Node, Table],
        rotations: Mapping[Node, Rotation],
        longest: int,
    ) -> None:
        """rotations: of fused attentions, what the operator does itself. longest: the maximum length, for which the
        tables are."""
        super().__init__(captured, level, values)
        self.longest = longest
        self.views, self.plan, self.tables, self.rotations = views, plan, tables, rotations
        self.context: dict[tuple[Node, bool], Node] = {}
        self.controls: dict[str, Node] = {}
        self.selected = False  # whether only the wanted positions are left
        self.outputs: list[tuple[Port, Node]] = []
        self.cached: list[CachedValue] = []

    def emit(self, contexts: list[Context], names: list[str], extras: list[Extra]) -> Program:
        """contexts: the values that encode gives, with the names of the inputs they become. extras: what is given
        beside the logits."""
        captured, plan = self.captured, self.plan
        assert captured.step is not None
        assert captured.step_name is not None
        step = captured.step
        features = tuple(int(size) for size in meta(step).shape[2:])  # of a series; ids have none
        tokens = self.input(captured.step_name, meta(step).dtype, (manifest.BATCH, manifest.NEW, *features))
        self.tokens = tokens
        for symbol in captured.batch:
            self.sizes[symbol] = (tokens, 0)
        for context, name in zip(contexts, names, strict=True):
            node, rows = context.node, context.rows or Rows(0)
            given = self.input(name, meta(node).dtype, context_shape(captured, context))
            self.context[node, context.one] = rows.merge(self.call, given)
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr != captured.time:
                    self.sizes.setdefault(size.node.expr, (given, rows.apart(axis)))
        results = [self._logits(), *extras]
        for node in captured.nodes:
            for roles in plan.demands.get(node, ()):
                self._value(node, roles)
            if node is plan.select:
                self._select([node, *(e.node for e in results)])
        if plan.select is None:
            self._select([e.node for e in results])
        made = [self.rows_first(self.made[e.node, self.views.roles(e.node)], e.axes) for e in results]
        ports = [Port(e.name, meta(e.node).dtype, e.shape) for e in results]
        self.outputs[:0] = zip(ports, made, strict=True)
        self.graph.output(self.apart([node for _, node in self.outputs]))
        return Program(
            GraphModule(self.root, self.graph),
            self.inputs,
            [port for port, _ in self.outputs],
            caches=self.cached,
            ragged_chunks=not plan.fused,
            extras=tuple(e.name for e in extras),
        )

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
            inside: dict[Any, Node] = {}  # of a region
            for part, choices in views.solve(node, roles).parts:
                leaves, spec = pytree.tree_flatten((part.args, part.kwargs))
                operands = [
                    inside.get(leaf) or self._operand(part, leaf, choice) if isinstance(leaf, Node) else leaf
                    for leaf, choice in zip(leaves, choices, strict=True)
                ]
                args, kwargs = pytree.tree_unflatten(operands, spec)
                inside[part] = self.copied(part, args, kwargs)
            self.made[node, roles] = inside[node]

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

    def _select(self, nodes: list[Node]) -> None:
        """Of those among the values that are made by now, only the wanted positions from here on."""
        for node in dict.fromkeys(nodes):
            key = node, self.views.roles(node)
            if key in self.made:
                time, batch = self.views.time_axes(node)[0], self.views.batch_axis(node)
                assert batch is not None
                select = self._control(manifest.SELECT)
                self.made[key] = self.call(onnx_operators.take_positions, self.made[key], select, batch, time)
        self.selected = True

    def _logits(self) -> Extra:
        """The output, (batch, time, vocabulary) or with the first two exchanged."""
        node = self.captured.output
        (time,), batch = self.views.time_axes(node), self.views.batch_axis(node)
        assert batch is not None
        return Extra("logits", node, (batch, time), (manifest.BATCH, manifest.WANTED, int(meta(node).shape[-1])))

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
                result = self.call(onnx_operators.slot_view, result, self._control(manifest.SLOTS), axis)
            return self._for_every_row(result, table.batch_rows)
        place = self._batch_place(user, leaf, table)
        key = "table", leaf, roles, place, self.selected
        if key not in self.made:
            self.made[key] = self._rows_of_table(leaf, table, place, new[0], every)
        return self.made[key]

    def _for_every_row(self, value: Node, rows: Rows | None) -> Node:
        """A table of one row's entries, for all rows where it cannot broadcast because the batch's axis is merged."""
        if rows is None or rows.times == 1:
            return value
        batch = self._size(next(iter(self.captured.batch)), self._time(NEW))
        apart = self.call(torch.unsqueeze, value, rows.own_axis)
        repeated = self.call(onnx_operators.repeat_rows, apart, batch, rows.own_axis)
        return rows.merge(self.call, repeated)

    def _rows_of_table(self, leaf: Node, table: Table, place: _TablePlace, new: int, every: list[int]) -> Node:
        rows, missing = place.rows, place.missing
        name = f"{leaf.name}_{missing}_{rows.axis}"
        own = rows.times > 1 and place.repeat == 1  # the table has several entries for each row

        def at(axis: int) -> int:
            return rows.apart(axis + missing) if own else axis + missing

        batch = rows.own_axis if own else rows.axis
        diagonals = table.diagonals(missing, rows.axis, own) if every and new < every[0] else None
        slots = self._control(manifest.SLOTS) if every else None
        if diagonals is not None:
            held = self.constant(name + "_diagonals", diagonals)
            where = batch, at(new), at(every[0])
            result = self.call(onnx_operators.table_diagonals, held, self._positions(), slots, *where)
        else:
            held = self.constant(f"{name}_{new}_rows", table.rows(missing, rows.axis, new + missing, own))
            result = self.call(onnx_operators.table_rows, held, self._positions(), batch, at(new))
            for other in every:
                result = self.call(onnx_operators.slot_view, result, slots, at(other))
        if own:
            return rows.merge(self.call, result)
        if place.repeat == 1:
            return result
        if rows.outer:
            return self.call(torch.repeat_interleave, result, place.repeat, rows.axis)
        return self.call(torch.cat, [result] * place.repeat, rows.axis)

    def _batch_place(self, user: Node, leaf: Node, table: Table) -> _TablePlace:
        """Positions differ from row to row, so a table's rows have a batch axis, which has to meet that of the
        operation's result; it may be merged with another, such as the heads."""
        if table.batch_rows is not None:
            return _TablePlace(table.batch_rows)
        rows, rank = self._result_rows(user), table.values.dim()
        if rows is not None:
            missing = max(0, meta(user).dim() - rows.axis - rank)
            at = rows.axis - meta(user).dim() + rank + missing
            if missing or (table.values.shape[at] == 1 and at not in table.time_axes):
                return _TablePlace(Rows(at, rows.times, rows.outer), missing, rows.times)
        raise UnsupportedModelError(
            f"`{user.target}` at {source_line(user)} uses a table over positions in a way that leaves no axis for the "
            "rows of a batch, whose positions differ"
        )

    def _result_rows(self, user: Node) -> Rows | None:
        result = meta(user)
        if isinstance(result, torch.Tensor):
            return self.views.rows(user)
        found = (times_batch(self.captured, size) for size in result[0].shape)
        return next((Rows(axis) for axis, times in enumerate(found) if times == 1), None)

    # -- caches ---------------------------------------------------------------------------------------------------

    def _cached(self, node: Node) -> Node:
        """The ALL view of a cut: its new rows written into its cache, and the cache as far as it may be read."""
        views = self.views
        rows, axis = views.rows(node), views.cuts[node]
        assert rows is not None
        new = rows.split(self.call, self.made[node, views.roles(node)])
        if rows.own_axis != 0:
            new = self.call(onnx_operators.moved, new, rows.own_axis, 0)
        cache = self._cache(node, rows, rows.apart(axis))
        slot = cache.shape.index(manifest.SLOT)
        present = self.call(onnx_operators.write_slots, cache.input, new, self._control(manifest.START), slot)
        self._extended(cache, present)
        view = self.call(onnx_operators.slot_view, present, self._control(manifest.SLOTS), slot)
        if rows.own_axis != 0:
            view = self.call(onnx_operators.moved, view, 0, rows.own_axis)
        return rows.merge(self.call, view)

    def _fused(self, attention: CachedAttention) -> Node:
        node, views = attention.node, self.views
        rotation = self.rotations.get(node)
        query, key = (rotation.query, rotation.key) if rotation else (arguments(node)[0], attention.key)
        operands = [self.made[n, views.roles(n)] for n in (query, key, attention.value)]
        turned: tuple[Any, ...] = ()
        if rotation is not None:
            for i, first in enumerate(rotation.time_first):
                operands[i] = self.call(torch.transpose, operands[i], 1, 2) if first else operands[i]
            turned = (
                self.constant(f"{node.name}_cosines", rotation.cosines),
                self.constant(f"{node.name}_sines", rotation.sines),
                rotation.interleaved,
            )
        bias = None
        if attention.bias is not None and not is_causal_alone(attention, self.tables):  # the operator itself is causal
            solution = views.solve(node, views.roles(node))
            bias = self._operand(node, attention.bias, solution.choices[0][3])
        caches = [self._cache(operand, Rows(0), 2) for operand in (attention.key, attention.value)]
        result = self.call(
            onnx_operators.grouped_query_attention,
            *operands,
            *(cache.input for cache in caches),
            self._control(manifest.LAST),
            self._control(manifest.TOTAL),
            bias,
            float(arguments(node)[4]),
            *turned,
        )
        for i, cache in enumerate(caches):
            self._extended(cache, self.call(operator.getitem, result, 1 + i))
        return self.call(operator.getitem, result, 0)

    def _cache(self, node: Node, rows: Rows, time: int) -> _Cache:
        """A new cache for a value's rows: its batch first, its other axes in their order. time: of the value split."""
        sizes = list(rows.shape(tuple(meta(node).shape), manifest.BATCH))
        sizes[time] = manifest.SLOT
        sizes.insert(0, sizes.pop(rows.own_axis))
        shape = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        index = len(self.cached)
        self.cached.append(CachedValue(f"past.{index}", f"present.{index}", node, rows))
        return _Cache(index, shape, self.input(f"past.{index}", meta(node).dtype, shape))

    def _extended(self, cache: _Cache, present: Node) -> None:
        held = self.cached[cache.index]
        self.outputs.append((Port(held.present, meta(held.node).dtype, cache.shape), present))


@dataclass(frozen=True)
class _TablePlace:
    """Where a table's rows meet the batch, after `missing` axes were put in front; each row stands `repeat` times."""

    rows: Rows
    missing: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class _Cache:
    index: int
    shape: tuple[int | str, ...]
    input: Node
