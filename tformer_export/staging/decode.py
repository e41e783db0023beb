"""The decode program: new tokens, contexts and caches → logits of the selected positions, and the extended caches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.batch_axes import BatchAxis, times_batch
from tformer_export.analysis.binding_time import Level
from tformer_export.capture.scan import Scan
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common import onnx_operators
from tformer_export.common.fx_nodes import arguments, aten, describe_node, meta, origin
from tformer_export.staging.auxiliary_outputs import AuxiliaryOutput
from tformer_export.staging.emitter import CachedValue, ContextTensor, Emitter, Port, Program, context_shape
from tformer_export.staging.layouts import Layout
from tformer_export.staging.lookback import Lookback
from tformer_export.staging.plan import CachedAttention, StagingPlan
from tformer_export.staging.recurrence import CarriedState, Recurrence
from tformer_export.staging.restriction import (
    ALL,
    BROADCAST,
    LOOKBACK_ROWS,
    NEW,
    AxisChoice,
    RestrictionSolver,
    Roles,
    Solution,
)
from tformer_export.staging.rotary import Rotation
from tformer_export.staging.row_by_row import RowByRow, computes_rows, find_row_by_row
from tformer_export.staging.tables import Table, is_causal_alone
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format import manifest

CONTROLS: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
    manifest.POSITIONS: (torch.int64, (manifest.BATCH_AXIS, manifest.NEW_AXIS)),
    manifest.LAST_POSITION: (torch.int32, (manifest.BATCH_AXIS,)),
    manifest.TOTAL_SLOTS: (torch.int32, ()),
    manifest.START_SLOT: (torch.int64, (manifest.BATCH_AXIS,)),
    manifest.NEW_COUNTS: (torch.int64, (manifest.BATCH_AXIS,)),
    manifest.SLOT_INDICES: (torch.int64, ("total",)),
    manifest.SELECTED_TOKENS: (torch.int64, (manifest.BATCH_AXIS, manifest.SELECTED_AXIS)),
    manifest.ADAPTER_ROWS: (torch.int64, (manifest.BATCH_AXIS,)),
}


class DecodeEmitter(Emitter):
    """Writes the decode stage: new tokens, contexts, caches → logits of the selected positions, and extended caches."""

    def __init__(
        self,
        captured: CapturedGraph,
        level: Mapping[Node, Level],
        values: Mapping[Node, Any],
        solver: RestrictionSolver,
        plan: StagingPlan,
        tables: Mapping[Node, Table],
        rotations: Mapping[Node, Rotation],
        max_length: int,
    ) -> None:
        """Make an empty program.

        rotations: fused attention → the rotation that its operator computes.
        max_length: the maximum length, which is the length of the tables.
        """
        super().__init__(captured, level, values)
        self.max_length = max_length
        self.solver, self.plan, self.tables, self.rotations = solver, plan, tables, rotations
        self.context: dict[tuple[Node, bool], Node] = {}
        self.controls: dict[str, Node] = {}
        self.selected = False  # whether only the selected positions are computed from here on
        self.outputs: list[tuple[Port, Node]] = []
        self.cached: list[CachedValue] = []

    def emit(self, contexts: list[ContextTensor], names: list[str], extras: list[AuxiliaryOutput]) -> Program:
        """Write the program.

        contexts: the values that encode computes. names: the names of their inputs here.
        extras: the outputs after the logits.
        """
        self._add_token_input()
        self._add_contexts(contexts, names)
        results = [self._logits(), *extras]
        for node in self.captured.nodes:
            for roles in self.plan.demands.get(node, ()):
                self._value(node, roles)
            if node is self.plan.select:
                self._select([node, *(e.node for e in results)])
        if self.plan.select is None:
            self._select([e.node for e in results])
        values = [self.move_rows_first(self.emitted[e.node, self.solver.roles(e.node)], e.axes) for e in results]
        ports = [Port(e.name, meta(e.node).dtype, e.shape) for e in results]
        self.outputs[:0] = zip(ports, values, strict=True)
        self.graph.output(self.distinct_outputs([node for _, node in self.outputs]))
        return Program(
            GraphModule(self.root, self.graph),
            self.inputs,
            [port for port, _ in self.outputs],
            caches=self.cached,
            chunked_prefill=not self.plan.fused,
            extras=tuple(e.name for e in extras),
        )

    def _add_token_input(self) -> None:
        """Add the input for the new tokens, from which the size of the batch is read."""
        captured = self.captured
        assert captured.step is not None
        assert captured.step_name is not None
        step = captured.step
        features = tuple(int(size) for size in meta(step).shape[2:])  # of a series; ids have none
        shape: tuple[int | str, ...] = (manifest.BATCH_AXIS, manifest.NEW_AXIS, *features)
        self.tokens = self.input(captured.step_name, meta(step).dtype, shape)
        for symbol in captured.batch:
            self.sizes[symbol] = (self.tokens, 0)

    def _add_contexts(self, contexts: list[ContextTensor], names: list[str]) -> None:
        """Add the inputs for the contexts, from which the sizes of the request are read."""
        for context, name in zip(contexts, names, strict=True):
            node, rows = context.node, context.rows or BatchAxis(0)
            value = self.input(name, meta(node).dtype, context_shape(self.captured, context))
            self.context[node, context.one] = rows.merge(self.call, value)
            for axis, size in enumerate(meta(node).shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr != self.captured.time:
                    self.sizes.setdefault(size.node.expr, (value, rows.axis_after_split(axis)))

    # -- values ---------------------------------------------------------------------------------------------------

    def _value(self, node: Node, roles: Roles) -> None:
        """Compute a value in these roles, unless the program does so already."""
        if (node, roles) in self.emitted:
            return
        captured, solver = self.captured, self.solver
        if node is captured.step and all(role == NEW for _, role in roles):
            self.emitted[node, roles] = self.tokens
        elif node in solver.cuts and roles == ((solver.cuts[node], ALL),):
            self._value(node, solver.roles(node))
            self.emitted[node, roles] = self._read_cache(node)
        elif node in self.plan.fused and all(role == NEW for _, role in roles):
            self.emitted[node, roles] = self._emit_fused(self.plan.fused[node])
        else:
            solution = solver.solve(node, roles)
            if solution.recurrence is not None:
                self.emitted[node, roles] = self._emit_loop(node, solution, solution.recurrence)
                return
            inside: dict[Any, Node] = {}  # values of the region
            row_by_row = self._row_by_row(solution, roles)
            if row_by_row is not None:
                self.emitted[node, roles] = self._emit_row_by_row(node, solution, row_by_row)
                return
            for part, choices in solution.parts:
                leaves, spec = pytree.tree_flatten((part.args, part.kwargs))
                operands = [
                    inside.get(leaf) or self._operand(part, leaf, choice, solution.lookback)
                    if isinstance(leaf, Node)
                    else leaf
                    for leaf, choice in zip(leaves, choices, strict=True)
                ]
                args, kwargs = pytree.tree_unflatten(operands, spec)
                inside[part] = self.copy(part, args, kwargs)
            result = inside[node]
            if solution.lookback is not None:
                result = self._new_rows(node, result, solution.lookback)
            self.emitted[node, roles] = result

    def _row_by_row(self, solution: Solution, roles: Roles) -> RowByRow | None:
        """Return an operation that computes rows alone, if the operation itself cannot read a table for each row."""
        node = solution.nodes[0]
        tables = [
            leaf
            for leaf, choice in zip(pytree.tree_leaves((node.args, node.kwargs)), solution.choices[0], strict=True)
            if leaf in self.tables and isinstance(choice, tuple) and NEW in dict(choice).values()
        ]
        if not tables or len(solution.nodes) > 1 or any(self.tables[table].batch_rows for table in tables):
            return None
        places = {table: self._free_place(node, self.tables[table]) for table in tables}
        if any(place is not None and place.repeat > 1 for place in places.values()):
            return None
        batch = next(self.solver.sizes[symbol] for symbol in self.captured.batch)

        def in_place(place: _TablePlace) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda value: value[(None,) * place.missing].repeat_interleave(batch, place.rows.axis)

        if None not in places.values():
            spec = pytree.tree_structure((node.args, node.kwargs))
            rows_of_table = {table: in_place(place) for table, place in places.items() if place is not None}

            def run(*operands: Any) -> Any:
                args, kwargs = pytree.tree_unflatten(operands, spec)
                return node.target(*args, **kwargs)  # type: ignore[operator]

            if computes_rows(self.solver, solution, roles, run, rows_of_table):
                return None
        return find_row_by_row(self.solver, solution, roles, tables)

    def _emit_row_by_row(self, node: Node, solution: Solution, row_by_row: RowByRow) -> Node:
        operands = [
            self._operand(node, leaf, choice, place=_ROWS_IN_FRONT) if isinstance(leaf, Node) else leaf
            for leaf, choice in zip(pytree.tree_leaves((node.args, node.kwargs)), solution.choices[0], strict=True)
        ]
        return self.call(row_by_row, *operands)

    def _operand(
        self,
        user: Node,
        leaf: Node,
        choice: AxisChoice,
        lookback: Lookback | None = None,
        place: _TablePlace | None = None,
    ) -> Any:
        """Return an operand of an operation, in the form of the choice. place: of the rows in a table."""
        if leaf in self.plan.of_adapters:
            return self._value_of_adapters(leaf)
        if choice == LOOKBACK_ROWS and lookback is not None:
            return self._operand_of_span(leaf, lookback)
        if isinstance(meta(leaf), torch.SymInt):
            role = choice[0][1] if isinstance(choice, tuple) else NEW
            return self.size(meta(leaf), self._time(role))
        if self.level[leaf] == Level.CONSTANT:
            if isinstance(choice, tuple):
                return self._gather_table(user, leaf, choice, place)
            return self.constant_value(leaf, self._time(NEW))
        if self.level[leaf] == Level.REQUEST and not isinstance(choice, tuple):
            return self.context[leaf, choice == BROADCAST]
        return self.emitted[leaf, choice if isinstance(choice, tuple) else ()]

    def _value_of_adapters(self, node: Node) -> Node:
        """Return a value that follows from the numbers of the rows' adapters, computed in this stage."""
        if node.op == "placeholder":
            return self._control(manifest.ADAPTER_ROWS)

        def operand(argument: Node) -> Any:
            if isinstance(meta(argument), torch.SymInt):
                return self.size(meta(argument), self._time(NEW))
            if self.level[argument] == Level.CONSTANT:
                return self.constant_value(argument, self._time(NEW))
            return self._value_of_adapters(argument)

        key = "of adapters", node
        if key not in self.emitted:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
            self.emitted[key] = self.copy(node, args, kwargs)
        return self.emitted[key]

    def _time(self, role: str) -> Node:
        """Return the number of positions in a role: all slots, or the positions that are being computed."""
        key = "time", role, self.selected and role == NEW
        if key not in self.emitted:
            if role == ALL:
                source, axis = self._control(manifest.SLOT_INDICES), 0
            elif self.selected:
                source, axis = self._control(manifest.SELECTED_TOKENS), 1
            else:
                source, axis = self.tokens, 1
            self.emitted[key] = self.call(aten.sym_size.int, source, axis)
        return self.emitted[key]

    def _control(self, name: str) -> Node:
        """Return a control input, added at the first call."""
        if name not in self.controls:
            dtype, shape = CONTROLS[name]
            self.controls[name] = self.input(name, dtype, shape)
        return self.controls[name]

    def _positions(self) -> Node:
        """Return the absolute positions of the rows that are being computed."""
        if not self.selected:
            return self._control(manifest.POSITIONS)
        if "selected positions" not in self.emitted:
            self.emitted["selected positions"] = self.call(
                torch.gather, self._control(manifest.POSITIONS), 1, self._control(manifest.SELECTED_TOKENS)
            )
        return self.emitted["selected positions"]

    def _select(self, nodes: list[Node]) -> None:
        """Keep only the selected positions of these values, as far as they have been computed, and of later values."""
        for node in dict.fromkeys(nodes):
            key = node, self.solver.roles(node)
            if key in self.emitted:
                time, batch = self.solver.time_axes(node)[0], self.solver.batch_axis(node)
                assert batch is not None
                select = self._control(manifest.SELECTED_TOKENS)
                self.emitted[key] = self.call(onnx_operators.take_positions, self.emitted[key], select, batch, time)
        self.selected = True

    def _logits(self) -> AuxiliaryOutput:
        """Return the model's output as an output of the file.

        The model may have the axes (batch, time, vocabulary), or the first two exchanged.
        """
        node = self.captured.output
        (time,), batch = self.solver.time_axes(node), self.solver.batch_axis(node)
        assert batch is not None
        return AuxiliaryOutput(
            "logits", node, (batch, time), (manifest.BATCH_AXIS, manifest.SELECTED_AXIS, int(meta(node).shape[-1]))
        )

    # -- regions that look back -----------------------------------------------------------------------------------

    def _span(self, lookback: Lookback) -> Node:
        """Return the number of positions for which a region is computed."""
        if lookback.rows is None:
            return self._time(ALL)
        key = "span", lookback.rows
        if key not in self.emitted:
            self.emitted[key] = self.call(operator.add, self._time(NEW), lookback.rows)
        return self.emitted[key]

    def _operand_of_span(self, leaf: Node, lookback: Lookback) -> Any:
        if isinstance(meta(leaf), torch.SymInt):
            return self.size(meta(leaf), self._span(lookback))
        if self.level[leaf] == Level.CONSTANT:
            return self.constant_value(leaf, self._span(lookback))
        if self.level[leaf] == Level.REQUEST:
            return self.context[leaf, False]
        if lookback.rows is None:
            return self.emitted[leaf, self.solver.roles(leaf, ALL)]
        if lookback.rows == 0:
            return self.emitted[leaf, self.solver.roles(leaf)]
        key = "window", leaf, lookback.rows, lookback.initial, lookback.period
        if key not in self.emitted:
            self.emitted[key] = self._window(leaf, lookback)
        return self.emitted[key]

    def _window(self, node: Node, lookback: Lookback) -> Node:
        """Return the carried rows of a value and the new ones; from the start of its region, if that has one.

        The carry holds the last rows before each row's next token.
        """
        solver, count, initial = self.solver, lookback.rows, lookback.initial
        assert count is not None
        rows, (axis,) = solver.rows(node), solver.time_axes(node)
        assert rows is not None
        new = rows.split(self.call, self.emitted[node, solver.roles(node)])
        if rows.batch_axis != 0:
            new = self.call(onnx_operators.move_axes, new, rows.batch_axis, 0)
        carry = self._cache(node, rows, axis, count)
        time = rows.axis_after_split(axis) + (rows.axis_after_split(axis) < rows.batch_axis)
        window = self.call(torch.cat, [carry.input, new], time)
        places = self.constant(f"carried_{count}", torch.arange(count)[None])
        counts = self.call(torch.unsqueeze, self._control(manifest.NEW_COUNTS), 1)
        kept = self.call(operator.add, counts, places)
        self._add_present(carry, self.call(onnx_operators.take_positions, window, kept, 0, time))
        if initial is not None:
            window = self._with_initial_rows(window, time, len(carry.shape), count, self._initial_row(initial, rows))
        if lookback.period is not None:
            window = self.call(lookback.rows_from_start, window, self._control(manifest.START_SLOT), time)
        if rows.batch_axis != 0:
            window = self.call(onnx_operators.move_axes, window, 0, rows.batch_axis)
        return rows.merge(self.call, window)

    def _initial_row(self, initial: Node, rows: BatchAxis) -> Node:
        value = self.constant_value(initial, self._time(NEW))
        return self.call(onnx_operators.move_axes, value, rows.batch_axis, 0) if rows.batch_axis != 0 else value

    def _with_initial_rows(self, window: Node, axis: int, rank: int, count: int, initial: Node) -> Node:
        """Put a constant in the place of the rows before the first position.

        window: (batch, …, count + new, …), with its positions on `axis`.
        """
        start = self.call(torch.unsqueeze, self._control(manifest.START_SLOT), 1)
        offsets = self.call(torch.arange, self.call(operator.add, self._time(NEW), count))
        positions = self.call(operator.add, start, self.call(operator.sub, offsets, count))  # (batch, count + new)
        is_before = self.call(operator.lt, positions, 0)
        for other in range(1, rank):
            if other != axis:
                is_before = self.call(torch.unsqueeze, is_before, other)
        return self.call(torch.where, is_before, initial, window)

    def _new_rows(self, node: Node, result: Node, lookback: Lookback) -> Node:
        """Return the rows of a region's result that belong to the new positions."""
        if lookback.rows == 0:
            return result
        if lookback.rows is not None and lookback.period is None:
            return self.call(torch.narrow, result, lookback.axis, lookback.rows, self._time(NEW))
        rows = self.solver.rows(node)
        assert rows is not None
        axes, split = (rows.batch_axis, rows.axis_after_split(lookback.axis)), rows.split(self.call, result)
        if lookback.rows is None:
            kept = self.call(onnx_operators.take_positions, split, self._control(manifest.POSITIONS), *axes)
        else:
            first = self._control(manifest.START_SLOT)
            kept = self.call(lookback.new_rows, split, first, self._time(NEW), *axes)
        return rows.merge(self.call, kept)

    # -- loops over positions -------------------------------------------------------------------------------------

    def _emit_loop(self, node: Node, solution: Solution, recurrence: Recurrence) -> Node:
        """Compute a loop for the new positions from the states that it carries.

        Positions after a row's last token do not change its states.
        """
        scan = node.target
        assert isinstance(scan, Scan)
        operands = [
            self._operand(node, leaf, choice) if isinstance(leaf, Node) else leaf
            for leaf, choice in zip(node.args, solution.choices[0], strict=True)
        ]
        carries = [self._state_carry(node, state) for state in recurrence.states]
        for i, (state, carry) in enumerate(zip(recurrence.states, carries, strict=True)):
            operands[i] = self._state_before(state, carry, operands[i])
        counts = self.call(torch.unsqueeze, self._control(manifest.NEW_COUNTS), 0)
        offsets = self.call(torch.unsqueeze, self.call(torch.arange, self._time(NEW)), 1)
        end = scan.num_states + scan.num_sequences
        operands.insert(end, self.call(operator.lt, offsets, counts))  # (new, batch)
        guarded = scan.guarded([(s.rows.axis, s.rows.times, s.rows.outer) for s in recurrence.states])
        result = self.graph.call_function(guarded, tuple(operands))
        result.meta = origin(node)
        for state, carry in zip(recurrence.states, carries, strict=True):
            last = state.rows.split(self.call, self.call(operator.getitem, result, state.result))
            if state.rows.batch_axis != 0:
                last = self.call(onnx_operators.move_axes, last, state.rows.batch_axis, 0)
            self.outputs.append((Port(self.cached[carry.index].present, state.dtype, carry.shape), last))
        return result

    def _state_carry(self, node: Node, state: CarriedState) -> _CacheTensors:
        sizes = list(state.rows.shape(state.shape, manifest.BATCH_AXIS))
        sizes.insert(0, sizes.pop(state.rows.batch_axis))
        shape = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        index = len(self.cached)
        names = f"past.{index}", f"present.{index}"
        self.cached.append(CachedValue(*names, node, state.rows, 0, state=state.result))
        return _CacheTensors(index, shape, self.input(names[0], state.dtype, shape))

    def _state_before(self, state: CarriedState, carry: _CacheTensors, initial: Any) -> Node:
        """Return a state before the new positions: the carry, or the model's initial state of rows without tokens."""
        value = carry.input
        if state.rows.batch_axis != 0:
            value = self.call(onnx_operators.move_axes, value, 0, state.rows.batch_axis)
        value = state.rows.merge(self.call, value)
        if state.initial is None:
            return value
        is_first = self.call(operator.eq, self._control(manifest.START_SLOT), 0)
        if state.rows.times > 1:
            is_first = self.call(torch.unsqueeze, is_first, 1 if state.rows.outer else 0)
            repeats = (-1, state.rows.times) if state.rows.outer else (state.rows.times, -1)
            is_first = self.call(torch.flatten, self.call(aten.expand.default, is_first, list(repeats)))
        shape = [-1 if axis == state.rows.axis else 1 for axis in range(len(state.shape))]
        return self.call(torch.where, self.call(torch.reshape, is_first, shape), initial, value)

    # -- tables ---------------------------------------------------------------------------------------------------

    def _gather_table(self, user: Node, leaf: Node, roles: Roles, place: _TablePlace | None = None) -> Node:
        """Return the entries of a table for the new positions of each row.

        They have a batch axis where the user's operation has it.
        """
        new = [axis for axis, role in roles if role == NEW]
        every = [axis for axis, role in roles if role == ALL]
        if len(new) > 1:
            raise UnsupportedModelError(f"{describe_node(leaf)} is indexed twice by the new position")
        table = self.tables[leaf]
        if not new:  # a slot has the same position in every row
            result = self.constant(leaf.name, table.values)
            for axis in every:
                result = self._slots_of_table(table, result, axis, axis)
            return self._repeat_for_rows(result, table.batch_rows)
        place = place or self._batch_place(user, table)
        key = "table", leaf, roles, place, self.selected
        if key not in self.emitted:
            self.emitted[key] = self._rows_of_table(leaf, table, place, new[0], every)
        return self.emitted[key]

    def _repeat_for_rows(self, value: Node, rows: BatchAxis | None) -> Node:
        """Repeat the table of one row for all rows if the merged batch axis prevents a broadcast."""
        if rows is None or rows.times == 1:
            return value
        batch = self._size(next(iter(self.captured.batch)), self._time(NEW))
        unmerged = self.call(torch.unsqueeze, value, rows.batch_axis)
        repeated = self.call(onnx_operators.repeat_rows, unmerged, batch, rows.batch_axis)
        return rows.merge(self.call, repeated)

    def _rows_of_table(self, leaf: Node, table: Table, place: _TablePlace, new: int, every: list[int]) -> Node:
        """Read a table at the new positions on axis `new`, and at all slots on the axes `every`."""
        rows, missing = place.rows, place.missing
        name = f"{leaf.name}_{missing}_{rows.axis}"
        has_row_entries = rows.times > 1 and place.repeat == 1  # the table has several entries for each row

        def result_axis(axis: int) -> int:
            return rows.axis_after_split(axis + missing) if has_row_entries else axis + missing

        batch = rows.batch_axis if has_row_entries else rows.axis
        diagonals = table.diagonals(missing, rows.axis, has_row_entries) if every and new < every[0] else None
        if diagonals is not None:
            stored = self.constant(name + "_diagonals", diagonals)
            axes = batch, result_axis(new), result_axis(every[0])
            slots = self._control(manifest.SLOT_INDICES)
            result = self.call(onnx_operators.table_diagonals, stored, self._positions(), slots, *axes)
        else:
            stored = self.constant(f"{name}_{new}_rows", table.rows(missing, rows.axis, new + missing, has_row_entries))
            result = self.call(
                onnx_operators.table_rows, stored, self._table_positions(table, new), batch, result_axis(new)
            )
            for other in every:
                result = self._slots_of_table(table, result, other, result_axis(other))
        if has_row_entries:
            return rows.merge(self.call, result)
        if place.repeat == 1:
            return result
        if rows.outer:
            return self.call(torch.repeat_interleave, result, place.repeat, rows.axis)
        return self.call(torch.cat, [result] * place.repeat, rows.axis)

    def _table_positions(self, table: Table, axis: int) -> Node:
        """Return the rows of a table for the new positions, (batch, rows before them + new + rows after them)."""
        layout, positions = table.layout(axis), self._positions()
        if not layout.is_padded:
            return positions
        shifted = self.call(operator.add, positions, layout.front)
        front, back = self._constant_rows(layout)
        batch = self._size(next(iter(self.captured.batch)), self._time(NEW))
        parts = [self.call(onnx_operators.repeat_rows, part, batch, 0) for part in (front, back)]
        return self.call(torch.cat, [parts[0], shifted, parts[1]], 1)

    def _slots_of_table(self, table: Table, value: Node, axis: int, result_axis: int) -> Node:
        """Narrow a table, or rows of it, to the slots: rows before them, slots, rows after them."""
        layout, slots = table.layout(axis), self._control(manifest.SLOT_INDICES)
        if not layout.is_padded:
            return self.call(onnx_operators.slot_view, value, slots, result_axis)
        front, back = (self.call(torch.squeeze, part, 0) for part in self._constant_rows(layout))
        index = self.call(torch.cat, [front, self.call(operator.add, slots, layout.front), back], 0)
        return self.call(torch.index_select, value, result_axis, index)

    def _constant_rows(self, layout: Layout) -> tuple[Node, Node]:
        """Return the numbers (1, front) and (1, back) of the rows of a table besides those of the positions."""
        assert self.max_length is not None
        first = layout.front + self.max_length
        return (
            self.constant(f"front_{layout.front}", torch.arange(layout.front)[None]),
            self.constant(f"back_{first}_{layout.back}", torch.arange(first, first + layout.back)[None]),
        )

    def _batch_place(self, user: Node, table: Table) -> _TablePlace:
        """Return the place of a batch axis in a table.

        Positions differ between rows, so the gathered entries have a batch axis. It has to meet the batch axis of the
        operation's result, which may be merged with another axis, such as the heads.
        """
        place = self._free_place(user, table)
        if place is not None:
            return place
        raise UnsupportedModelError(
            f"{describe_node(user)} uses a table over positions in a way that leaves no axis for the "
            "rows of a batch, whose positions differ"
        )

    def _free_place(self, user: Node, table: Table) -> _TablePlace | None:
        """Return the place of a batch axis in a table by the rules of broadcasting; None if there is none."""
        if table.batch_rows is not None:
            return _TablePlace(table.batch_rows)
        rows, rank = self._result_rows(user), table.values.dim()
        if rows is not None:
            missing = max(0, meta(user).dim() - rows.axis - rank)
            table_axis = rows.axis - meta(user).dim() + rank + missing
            if missing or (table.values.shape[table_axis] == 1 and table_axis not in table.time_axes):
                return _TablePlace(BatchAxis(table_axis, rows.times, rows.outer), missing, rows.times)
        return None

    def _result_rows(self, user: Node) -> BatchAxis | None:
        result = meta(user)
        if isinstance(result, torch.Tensor):
            return self.solver.rows(user)
        ratios = (times_batch(self.captured, size) for size in result[0].shape)
        return next((BatchAxis(axis) for axis, times in enumerate(ratios) if times == 1), None)

    # -- caches ---------------------------------------------------------------------------------------------------

    def _read_cache(self, node: Node) -> Node:
        """Return all positions of a cut.

        Its new rows are written into its cache, and the cache is read up to the last slot.
        """
        solver = self.solver
        rows, axis = solver.rows(node), solver.cuts[node]
        assert rows is not None
        front, new, back = self._parts(self.emitted[node, solver.roles(node)], axis, solver.layout(node, axis))
        new = rows.split(self.call, new)
        if rows.batch_axis != 0:
            new = self.call(onnx_operators.move_axes, new, rows.batch_axis, 0)
        cache = self._cache(node, rows, axis)
        slot = cache.shape.index(manifest.SLOT_AXIS)
        present = self.call(onnx_operators.write_slots, cache.input, new, self._control(manifest.START_SLOT), slot)
        self._add_present(cache, present)
        view = self.call(onnx_operators.slot_view, present, self._control(manifest.SLOT_INDICES), slot)
        if rows.batch_axis != 0:
            view = self.call(onnx_operators.move_axes, view, 0, rows.batch_axis)
        merged = rows.merge(self.call, view)
        return self.call(torch.cat, [*front, merged, *back], axis) if front or back else merged

    def _parts(self, value: Node, axis: int, layout: Layout) -> tuple[list[Node], Node, list[Node]]:
        """Return the rows of a value before the new positions, of the new positions, and after them."""
        if not layout.is_padded:
            return [], value, []
        count = self._time(NEW)
        end = self.call(operator.add, count, layout.front)
        front = [self.call(torch.narrow, value, axis, 0, layout.front)] if layout.front else []
        back = [self.call(torch.narrow, value, axis, end, layout.back)] if layout.back else []
        return front, self.call(torch.narrow, value, axis, layout.front, count), back

    def _emit_fused(self, attention: CachedAttention) -> Node:
        """Compute an attention by the operator that updates its own caches."""
        node, solver = attention.node, self.solver
        rotation = self.rotations.get(node)
        query, key = (rotation.query, rotation.key) if rotation else (arguments(node)[0], attention.key)
        operands = [self.emitted[n, solver.roles(n)] for n in (query, key, attention.value)]
        rotation_arguments: tuple[Any, ...] = ()
        if rotation is not None:
            for i, is_time_first in enumerate(rotation.time_first):
                operands[i] = self.call(torch.transpose, operands[i], 1, 2) if is_time_first else operands[i]
            rotation_arguments = (
                self.constant(f"{node.name}_cosines", rotation.cosines),
                self.constant(f"{node.name}_sines", rotation.sines),
                rotation.interleaved,
            )
        bias = None
        if attention.bias is not None and not is_causal_alone(attention, self.tables):  # the operator itself is causal
            solution = solver.solve(node, solver.roles(node))
            bias = self._operand(node, attention.bias, solution.choices[0][3])
        caches = [self._cache(operand, BatchAxis(0), 2) for operand in (attention.key, attention.value)]
        result = self.call(
            onnx_operators.grouped_query_attention,
            *operands,
            *(cache.input for cache in caches),
            self._control(manifest.LAST_POSITION),
            self._control(manifest.TOTAL_SLOTS),
            bias,
            *map(float, arguments(node)[4:6]),
            *rotation_arguments,
        )
        for i, cache in enumerate(caches):
            self._add_present(cache, self.call(operator.getitem, result, 1 + i))
        return self.call(operator.getitem, result, 0)

    def _cache(self, node: Node, rows: BatchAxis, time: int, num_carried: int | None = None) -> _CacheTensors:
        """Add a cache for a value: its batch axis first, the other axes in their order.

        time: the time axis of the value.
        num_carried: the number of rows of a carry.
        """
        sizes = list(rows.shape(tuple(meta(node).shape), manifest.BATCH_AXIS))
        sizes[rows.axis_after_split(time)] = manifest.SLOT_AXIS if num_carried is None else num_carried
        sizes.insert(0, sizes.pop(rows.batch_axis))
        shape = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        index = len(self.cached)
        layout = self.solver.layout(node, time)
        self.cached.append(CachedValue(f"past.{index}", f"present.{index}", node, rows, time, layout, num_carried))
        return _CacheTensors(index, shape, self.input(f"past.{index}", meta(node).dtype, shape))

    def _add_present(self, cache: _CacheTensors, present: Node) -> None:
        cached_value = self.cached[cache.index]
        self.outputs.append((Port(cached_value.present, meta(cached_value.node).dtype, cache.shape), present))


@dataclass(frozen=True)
class _TablePlace:
    """The place of a batch axis in a table.

    rows: the axis, after `missing` axes were added in front.
    repeat: the number of entries of each row of the batch that share the table's entry.
    """

    rows: BatchAxis
    missing: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class _CacheTensors:
    """A cache: its number, the shape of its tensors, and its input."""

    index: int
    shape: tuple[int | str, ...]
    input: Node


_ROWS_IN_FRONT = _TablePlace(BatchAxis(0), missing=1)
