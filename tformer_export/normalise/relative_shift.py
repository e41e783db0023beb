"""Products with a table of distances that are shifted row by row, rewritten so that each row reads its own distances.

Relative attention multiplies the queries with a table E of the distances T − 1 … 0 and shifts row i of the product M by
T − 1 − i columns, so that column j holds the distance i − j (Dai et al. 2019, "Transformer-XL"; Huang et al. 2018,
"Music Transformer"). The shift pads M with a column, reads it with the sizes of its axes exchanged, and drops a row.
These operations mix the rows of M, and the columns of E change their meaning with T, so that no step can compute them
for new rows alone. The rewritten product has the columns of E in reverse order, which are the distances 0 … T − 1, and
row i takes its column i − j by index.

The shift also fills the places of later positions, j > i, with rows of other queries. The rewritten one fills them with
the column of distance 0. A causal mask hides both; the rewrite is made only if the output stays the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.attention import NodeBuilder
from tformer_export.analysis.interpreter import call, run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.fx_nodes import aten, expression, meta
from tformer_export.common.onnx_operators import take_distances

MAX_CHAIN = 12  # operations of a shift, or from the product to the shift


@dataclass(frozen=True)
class _Shift:
    """A shift from `product`, with the axes (query, column), to `result`; order: the axis of each result axis."""

    product: Node
    result: Node
    query: int
    column: int
    order: tuple[int, ...]


def shifts_to_lookups(captured: CapturedGraph) -> int:
    """Rewrite the shifted products of a graph in place and return their number.

    Cost: two runs of the graph on the example for each shift.
    """
    if captured.step is None or captured.time is None:
        return 0
    count = 0
    while _rewrite_one(captured):
        count += 1
    return count


def _rewrite_one(captured: CapturedGraph) -> bool:
    of_step = _step_nodes(captured)
    candidates = [n for n in captured.nodes if n in of_step and _is_padded(captured, n)]
    if not candidates:
        return False
    values = run(captured, captured.example)
    for padded in candidates:
        product = next((n for n in _above(padded, of_step) if len(_time_axes(captured, n)) == 2), None)
        if product is None:
            continue
        for result in _below(padded, of_step):
            if len(_time_axes(captured, result)) != 2 or values[result].dim() != values[product].dim():
                continue
            shift = _find_shift(captured, product, result, values)
            if shift is not None and _rewrite(captured, shift, of_step, values):
                return True
    return False


def _step_nodes(captured: CapturedGraph) -> set[Node]:
    """Return the values that depend on numbers of the step input, and not on its sizes alone."""
    found = {captured.step}
    for node in captured.nodes:
        if not isinstance(meta(node), torch.SymInt) and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return {n for n in found if n is not None}


def _time_axes(captured: CapturedGraph, node: Node) -> list[int]:
    value = meta(node)
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return [a for a, size in enumerate(sizes) if expression(size) == captured.time]


def _is_padded(captured: CapturedGraph, node: Node) -> bool:
    """Return whether a value has axes of time and time + 1: the padded product, or its view with exchanged axes."""
    value = meta(node)
    assert captured.time is not None
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and any(expression(size) == captured.time + 1 for size in value.shape)
        and len(_time_axes(captured, node)) == 1
        and not any(_is_padded(captured, n) for n in node.all_input_nodes)
    )


def _above(node: Node, of_step: set[Node]) -> Iterator[Node]:
    """Yield the operand of an operation that depends on the step input, and its operand, while there is only one."""
    for _ in range(MAX_CHAIN):
        operands = [n for n in node.all_input_nodes if n in of_step]
        if len(operands) != 1:
            return
        node = operands[0]
        yield node


def _below(node: Node, of_step: set[Node]) -> Iterator[Node]:
    """Yield the only user of a value, and its only user, while it has no other operand that depends on the step."""
    for _ in range(MAX_CHAIN):
        users = [user for user in node.users if user in of_step]
        if len(users) != 1 or sum(n in of_step for n in users[0].all_input_nodes) != 1:
            return
        node = users[0]
        yield node


def _chain(first: Node, last: Node, of_step: set[Node]) -> list[Node]:
    """Return the operations between two values of a chain, with the last one."""
    nodes = [last, *itertools.takewhile(lambda n: n is not first, _above(last, of_step))]
    return nodes[::-1]


def _recomputed(nodes: list[Node], changed: Mapping[Node, Any], values: Mapping[Node, Any]) -> Any:
    """Run operations with other operands and return the result of the last."""
    known = dict(changed)
    for node in nodes:
        known[node] = call(node, lambda n: known[n] if n in known else values[n])
    return known[nodes[-1]]


def _find_shift(captured: CapturedGraph, product: Node, result: Node, values: Mapping[Node, Any]) -> _Shift | None:
    """Return the shift that leads from a product to a result, found by the places to which it moves each number."""
    shape = values[product].shape
    numbers = torch.arange(values[product].numel(), dtype=torch.float64).reshape(shape) + 1  # 0: padding
    try:
        moved = _recomputed(_chain(product, result, _step_nodes(captured)), {product: numbers}, values)
    except (RuntimeError, TypeError, ValueError):
        return None
    places = torch.unravel_index((moved.long() - 1).clamp(min=0), shape)  # of the product, for each of the result
    indices = torch.meshgrid(*(torch.arange(size) for size in moved.shape), indexing="ij")
    for row, other in itertools.permutations(_time_axes(captured, result), 2):
        seen = indices[other] <= indices[row]
        if not bool((moved[seen] > 0).all()):
            continue
        for query, column in itertools.permutations(_time_axes(captured, product), 2):
            distance = shape[column] - 1 - indices[row] + indices[other]
            if not _agree(places[query], indices[row], seen) or not _agree(places[column], distance, seen):
                continue
            order: list[int] = []
            for axis in range(moved.dim()):
                if axis in (row, other):
                    order.append(query if axis == row else column)
                    continue
                taken = {query, column, *order}
                same = [a for a in range(len(shape)) if a not in taken and _agree(places[a], indices[axis], seen)]
                order.extend(same[:1])
            if sorted(order) == list(range(len(shape))):
                return _Shift(product, result, query, column, tuple(order))
    return None


def _agree(actual: torch.Tensor, expected: torch.Tensor, where: torch.Tensor) -> bool:
    return torch.equal(actual[where], expected[where])


def _rewrite(captured: CapturedGraph, shift: _Shift, of_step: set[Node], values: Mapping[Node, Any]) -> bool:
    """Rewrite a shift if the columns of its product come from a table; return whether it was rewritten."""
    nodes = [shift.product]
    found = _table(captured, shift.product, of_step)
    for node in _above(shift.product, of_step):
        if found is not None:
            break
        nodes.insert(0, node)
        found = _table(captured, node, of_step)
    if found is None:
        return False
    table, axis = found
    try:
        reversed_product = _recomputed(nodes, {table: values[table].flip(axis)}, values)
    except (RuntimeError, TypeError, ValueError):
        return False
    if not _is_close(reversed_product, values[shift.product].flip(shift.column)):
        return False
    make = NodeBuilder(captured.graph, nodes[0])
    copies: dict[Node, Node] = {table: make(aten.flip.default, table, [axis])}
    for node in nodes:
        make = NodeBuilder(captured.graph, node)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        copies[node] = make(_target(node), *args, **kwargs)
    make = NodeBuilder(captured.graph, shift.result)
    product = copies[shift.product]
    positions = make(aten.arange.default, make.size(product, shift.query))
    distances = make(aten.sub.Tensor, make(aten.unsqueeze.default, positions, 1), positions)
    distances = make(aten.clamp.default, distances, 0)
    if shift.column < shift.query:
        distances = make(aten.permute.default, distances, [1, 0])
    for other in range(len(shift.order)):
        if other not in (shift.query, shift.column):
            distances = make(aten.unsqueeze.default, distances, other)
    taken = make(take_distances, product, distances, shift.column)
    result = make(aten.permute.default, taken, list(shift.order))
    users = list(shift.result.users)
    shift.result.replace_all_uses_with(result)
    if _is_close(run(captured, captured.example)[captured.output], values[captured.output]):
        captured.graph.eliminate_dead_code()
        return True
    for user in users:
        user.replace_input_with(result, shift.result)
    captured.graph.eliminate_dead_code()
    return False


def _table(captured: CapturedGraph, product: Node, of_step: set[Node]) -> tuple[Node, int] | None:
    """Return the operand of a product that does not depend on the step input, and its only axis of the time's size."""
    for operand in product.all_input_nodes:
        if operand not in of_step and isinstance(meta(operand), torch.Tensor):
            axes = _time_axes(captured, operand)
            if len(axes) == 1:
                return operand, axes[0]
    return None


def _target(node: Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two values are equal up to rounding, and infinite at the same places."""
    return result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
