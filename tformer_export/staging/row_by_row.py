"""Operations that compute each row of a batch alone, because a table of positions has no axis for the rows.

In `einsum("bhqd,qkd->bhqk", queries, table)` all rows share a table. In a decode step their positions differ, so each
row has a table of its own, for which the equation has no letter. The operation is mapped over the rows (`torch.vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.analysis.binding_time import Level
from tformer_export.common.fx_nodes import expression, meta
from tformer_export.staging.restriction import PROBE_WINDOWS, RestrictionSolver, Roles, Solution, is_close


@dataclass(frozen=True)
class RowByRow:
    """An operation on leaves of (args, kwargs), which runs on each row of the batch alone, as on a batch of one row.

    rows: for each leaf the axis of its rows; None for a leaf that is the same for all rows.
    tables: the numbers of the leaves whose rows have an axis in front that the operation does not have.
    result: the axis of the rows in the result.
    """

    target: Any
    spec: pytree.TreeSpec
    rows: tuple[BatchAxis | None, ...]
    tables: frozenset[int]
    result: BatchAxis
    __name__ = "row_by_row"  # torch.fx writes code that calls it

    def __call__(self, *leaves: Any) -> torch.Tensor:
        mapped = [i for i, rows in enumerate(self.rows) if rows is not None]

        def run(*parts: torch.Tensor) -> torch.Tensor:
            own = list(leaves)
            for i, part in zip(mapped, parts, strict=True):
                own[i] = part if i in self.tables else _with_row_axis(part, self.rows[i])
            args, kwargs = pytree.tree_unflatten(own, self.spec)
            result: torch.Tensor = self.target(*args, **kwargs)
            return result.squeeze(self.result.axis) if self.result.times == 1 else result

        def call(function: Any, *args: Any) -> Any:
            return function(*args)

        split = [rows.split(call, leaves[i]) for i, rows in enumerate(self.rows) if rows is not None]
        in_dims = tuple(rows.batch_axis for rows in self.rows if rows is not None)
        result = torch.vmap(run, in_dims=in_dims, out_dims=self.result.batch_axis)(*split)
        merged: torch.Tensor = self.result.merge(call, result)
        return merged


def _with_row_axis(row: torch.Tensor, rows: BatchAxis | None) -> torch.Tensor:
    """Return a row with the axis of the batch. An axis that is merged with the batch is there already."""
    return row.unsqueeze(rows.axis) if rows is not None and rows.times == 1 else row


def find_row_by_row(
    solver: RestrictionSolver, solution: Solution, roles: Roles, tables: Sequence[Node]
) -> RowByRow | None:
    """Return an operation that computes rows alone, of which each has its own entries of the tables, in front.

    None if its results differ from the traced ones, or if the rows of an operand or of the result are ambiguous.
    """
    (node,) = solution.nodes
    result = solver.rows(node)
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    rows: list[BatchAxis | None] = []
    for leaf in leaves:
        axis = None
        if leaf in tables:
            axis = BatchAxis(0)
        elif isinstance(leaf, Node) and isinstance(meta(leaf), torch.SymInt):
            if expression(meta(leaf)).free_symbols & solver.captured.batch:
                return None
        elif isinstance(leaf, Node) and solver.level[leaf] != Level.CONSTANT:
            axis = solver.rows(leaf)
            if axis is None:
                return None
        rows.append(axis)
    if result is None:
        return None
    operation = RowByRow(
        node.target, spec, tuple(rows), frozenset(i for i, leaf in enumerate(leaves) if leaf in tables), result
    )
    batch = next(solver.sizes[symbol] for symbol in solver.captured.batch)
    added = dict.fromkeys(tables, lambda value: torch.stack([value] * batch))
    return operation if computes_rows(solver, solution, roles, operation, added) else None


def computes_rows(
    solver: RestrictionSolver,
    solution: Solution,
    roles: Roles,
    operation: Callable[..., Any],
    rows_of_table: Mapping[Node, Callable[[torch.Tensor], torch.Tensor]],
) -> bool:
    """Return whether an operation on the leaves gives the traced results if each row has its own entries of tables.

    rows_of_table: table → a function that gives it an axis of rows.
    Cost: a few runs of the operation, at sizes of about 6.
    """
    (node,) = solution.nodes
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    for window in PROBE_WINDOWS:
        operands = [solver.operand(leaf, one, window) for leaf, one in zip(leaves, solution.choices[0], strict=True)]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Node) and leaf in rows_of_table:
                operands[i] = rows_of_table[leaf](operands[i])
        try:
            if not is_close(operation(*operands), solver.restrict(node, roles, window)):
                return False
        except (RuntimeError, IndexError, ValueError):
            return False
    return True
