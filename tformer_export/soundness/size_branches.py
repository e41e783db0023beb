"""Branches on sizes, such as `if positions.max() + 1 > self.max_length:`.

torch.export cannot follow these branches, because it has no values. The model is then traced with the example's values.
It goes the example's way and asserts the conditions of that way. These assertions are evaluated at other lengths, and
the greatest length for which they hold becomes a limit of the file. A branch that depends on data stays refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import Constants, run
from tformer_export.capture.graph_cleanup import drop_assertions
from tformer_export.capture.trace import ID_MOVES, CapturedGraph, count_ids
from tformer_export.capture.trace_errors import explain_branch
from tformer_export.common.example_sizes import Axis, in_order, least_size, resized
from tformer_export.common.fx_nodes import DENSE_SIZES, as_function, aten, expression, meta, source_line
from tformer_export.common.module_state import attempt, is_same
from tformer_export.sources.base import Source
from tformer_runtime.base.errors import UnsupportedModelError

BETWEEN = 8  # sizes between the dense ones
COMPARED = 4  # of the sizes at which a condition fails
COUNTED_IDS = 2  # of which sequences of one id are made
MAX_COUNTED = 1024  # positions at which forward is run to find whether its tables are long enough
MAX_ROWS = 64  # of a batch at which conditions are evaluated
TOLERANCE = 1e-3  # of the range of the outputs that a mask does not hide; another path differs by more
HIDDEN = 1e4  # below the greatest output: masks write −1e4, −1e9 or the least number


class OtherPathError(UnsupportedModelError):
    """Forward takes another path at a size of an axis of an input than a trace.

    axis: the name of the input and the number of the axis. line: the user's line of the branch, or "".
    """

    def __init__(self, message: str, axis: tuple[str, int], size: int, line: str) -> None:
        super().__init__(message)
        self.axis, self.size, self.line = axis, size, line


def refuse_same_path(captured: CapturedGraph, source: Source, error: Exception) -> None:
    """Raise OtherPathError if the graph differs from forward at the size at which another trace did.

    A trace by example knows nothing of a branch that its examples did not meet. Cost: that of one size.
    """
    if isinstance(error, OtherPathError):
        name, axis = error.axis
        symbol = expression(meta(captured.inputs[name]).shape[axis])
        if symbol.is_Symbol:
            _refuse_other_path(captured, source, _axes_of(captured, symbol), error.size, error.line)


def refuse_paths_beyond(captured: CapturedGraph, source: Source, limited: CapturedGraph) -> None:
    """Raise OtherPathError if the graph differs from forward just beyond the limits of another trace, in `limited`.

    Cost: that of one size for each limit.
    """
    for symbol, limit in limited.limits.items():
        for name, axis in _axes_of(limited, symbol)[:1]:
            same = expression(meta(captured.inputs[name]).shape[axis])
            if same.is_Symbol and limit < captured.limits.get(same, limit + 1):
                _refuse_other_path(
                    captured, source, _axes_of(captured, same), limit + 1, limited.limit_lines.get(symbol, "")
                )


def limit_by_branches(captured: CapturedGraph, max_length: int) -> None:
    """Set the limits within which the branches go the traced way, and drop the assertions, in place.

    max_length: the greatest length that is evaluated.

    Cost: the assertions are evaluated at some twenty lengths.

    Raises UnsupportedModelError if a branch depends on data.
    """
    if captured.branch_refusal is None:
        return
    conditions = [n.args[0] for n in captured.nodes if n.target is aten._assert_scalar.default]
    open_conditions = [n for n in conditions if isinstance(n, Node) and str(meta(n)) != "True"]
    level = binding_times(captured)
    on_data = [n for n in open_conditions if level[n] != Level.CONSTANT]
    if on_data and on_data[0] is not open_conditions[0]:  # the first branch depends on sizes or weights alone
        raise UnsupportedModelError(explain_branch(source_line(on_data[0])))
    if on_data or captured.time is None:
        raise UnsupportedModelError(captured.branch_refusal)
    constants = Constants(captured, level)
    symbols = {
        s for node in captured.inputs.values() for size in meta(node).shape for s in expression(size).free_symbols
    }

    def hold(length: int) -> bool:
        sizes = {**dict.fromkeys(symbols, 2), captured.time: length}
        return all(constants.at(open_conditions, sizes).values())

    if not all(map(hold, range(2, DENSE_SIZES))):
        raise UnsupportedModelError(captured.branch_refusal)
    low, high = DENSE_SIZES - 1, captured.limits.get(captured.time, max_length)
    if not hold(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if hold(middle) else (low, middle)
        captured.limits[captured.time] = low
    drop_assertions(captured.graph)


def check_guards(captured: CapturedGraph, source: Source, max_length: int) -> None:
    """Check the conditions on sizes that the trace met, at all sizes up to the greatest length, in place.

    torch.export vouches for a range of each size, and not for `n != 64` or `n / 50 <= 1`. A condition that holds up to
    a length limits the file to it. Where one fails at other sizes, the graph is compared with forward there.

    max_length: the greatest length that is evaluated.

    Raises UnsupportedModelError if forward takes another path at a size. Cost: each condition is evaluated at all
    sizes; a run of forward and one of the graph, with one row, for COMPARED sizes of each condition that fails.
    """
    for guard, line in captured.guards.items():
        for symbol in guard.free_symbols & _free_symbols(captured):
            high = MAX_ROWS if symbol in captured.batch else min(max_length, captured.limits.get(symbol, max_length))
            failing = _failing_sizes(captured, guard, symbol, high)
            axes = _axes_of(captured, symbol)
            compared = (
                {failing[i * (len(failing) - 1) // (COMPARED - 1)] for i in range(COMPARED)} if failing else set()
            )
            try:
                for size in sorted(compared):
                    _refuse_other_path(captured, source, axes, size, line)
            except OtherPathError:
                first = failing[0]
                if symbol in captured.batch or first < DENSE_SIZES or len(failing) < high - first + 1:
                    raise
                captured.limits[symbol] = first - 1
                if line:
                    captured.limit_lines[symbol] = line


def _failing_sizes(captured: CapturedGraph, guard: sympy.Basic, symbol: sympy.Symbol, high: int) -> list[int]:
    """Return the values of a symbol, from 2 to `high`, at which a condition fails. Others are as in the trace."""
    others = {
        other: captured.example[name].shape[axis]
        for name, node in captured.inputs.items()
        for axis, other in _axes(node)
        if other.is_Symbol and other != symbol
    }
    condition = guard.subs(others)
    if condition.free_symbols - {symbol}:  # a number that is read from data
        return []
    least = max(2, captured.least.get(symbol, 2))
    holds = as_function(condition, symbol)
    return [size for size in range(least, high + 1) if not holds(size)]


def _free_symbols(captured: CapturedGraph) -> set[sympy.Symbol]:
    return {s for node in captured.inputs.values() for _, s in _axes(node) if s.is_Symbol}


def _axes_of(captured: CapturedGraph, symbol: sympy.Symbol) -> list[tuple[str, int]]:
    """Return the inputs and their axes of a symbol; all batch axes for one of them."""
    if symbol in captured.batch:
        return [(name, 0) for name, node in captured.inputs.items() if expression(meta(node).shape[0]).is_Symbol]
    return _length_axes(captured, symbol)


def limit_lengths(captured: CapturedGraph, max_length: int) -> None:
    """Set the greatest length of all inputs, or a lesser one that is set, in place."""
    for node in captured.inputs.values():
        for axis, symbol in _axes(node):
            if axis > 0 and symbol.is_Symbol:
                captured.limits[symbol] = min(max_length, captured.limits.get(symbol, max_length))


def runs_beyond(captured: CapturedGraph, source: Source, enough: int = 2**31) -> dict[str, torch.Tensor]:
    """Return inputs on which forward runs, and of which one is longer than a limit of the graph; {} if there are none.

    enough: a limit that is not exceeded. Cost: at most five runs of forward for each limit, with one row.
    """
    for symbol, limit in captured.limits.items():
        axes = _length_axes(captured, symbol)
        if not axes or limit >= enough:
            continue
        inputs = _sized(source.example, axes, limit + 1)
        if attempt(source.module, inputs).first is not None and not _ends_for_some_ids(
            captured, source, inputs, axes, limit
        ):
            return inputs
    return {}


def _ends_for_some_ids(
    captured: CapturedGraph, source: Source, inputs: dict[str, torch.Tensor], axes: list[tuple[str, int]], limit: int
) -> bool:
    """Return whether forward runs at a length but no further for sequences of a single id.

    Many models count the positions of the ids that are not padding. So they run on longer sequences that have padding.
    Of two ids, one is not padding.
    """
    if (captured.step_name, 1) not in axes:
        return False
    fails = [one for one in _of_one_id(captured, inputs) if attempt(source.module, one).first is None]
    return any(attempt(source.module, _sized(one, axes, limit)).first is not None for one in fails)


def _of_one_id(captured: CapturedGraph, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return inputs for some ids, each with one id at all positions; the same inputs if they are numbers."""
    name = captured.step_name or ""
    if inputs[name].is_floating_point():
        return [inputs]
    ids = sorted({*inputs[name].flatten().tolist()})[:COUNTED_IDS]
    return [inputs | {name: torch.full_like(inputs[name], i)} for i in ids]


def limit_by_counted_positions(captured: CapturedGraph, source: Source, longest: int) -> None:
    """Limit the length to that at which forward runs, in place, if it counts positions by data and looks them up.

    `self.positions((ids != 7).cumsum(1))` is not a table over positions, whose end staging would find.

    Cost: none without such a lookup. Else two runs of forward with one row, of `MAX_COUNTED` positions at most; if one
    fails, as many as the logarithm of that number.
    """
    time = captured.time
    if time is None:
        return
    level = binding_times(captured)
    lookups = (node for node in captured.nodes if node.target is aten.embedding.default)
    lookup = next((node for node in lookups if _counts(captured, level, node)), None)
    if lookup is None:
        return
    axes = _length_axes(captured, time)

    def fails(length: int) -> bool:
        return any(
            attempt(source.module, one).first is None
            for one in _of_one_id(captured, _sized(source.example, axes, length))
        )

    high = min(longest, captured.limits.get(time, longest), MAX_COUNTED)
    if fails(high) and not fails(1):
        captured.limits[time] = 1 + bisect_left(range(2, high), True, key=fails)
        captured.limit_lines[time] = source_line(lookup)


def _counts(captured: CapturedGraph, level: Mapping[Node, Level], lookup: Node) -> bool:
    """Return whether what is looked up follows from the step input, and is not its ids themselves."""
    index = lookup.args[1]
    assert isinstance(index, Node)
    if level[index] is not Level.STEP:
        return False
    while index.target in ID_MOVES:
        index = index.all_input_nodes[0]
    return index is not captured.step


def refuse_other_paths(captured: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError if forward takes another path at sizes below those of the trace.

    A trace holds from some size on: `if n < 5` and `max(n - 5, 0)` go the way of the example. Below it, and at size 1,
    the graph is compared with forward.

    Cost: a run of forward and one of the graph, with one row, for each size of `sizes_below`.
    """
    for symbol in _free_symbols(captured) - captured.batch:
        axes = _length_axes(captured, symbol)
        least = captured.least.get(symbol, 2)
        for size in sizes_below(least):
            line = captured.least_lines.get(symbol)
            _refuse_other_path(captured, source, axes, size, line or "", may_fail=least == 2, below=True)


def find_needed_lengths(captured: CapturedGraph, source: Source) -> None:
    """Set the least lengths of the request inputs at which forward runs, in place.

    A kernel or a patch needs as many positions as it has. The graph may give numbers for fewer, where forward raises.

    Cost: a run of forward with one row for each length of an input; of inputs that need many positions, one for each
    halving of the length.
    """
    for symbol in _free_symbols(captured) - captured.batch - {captured.time}:
        axes = [(name, axis) for name, axis in _length_axes(captured, symbol) if name not in source.placeholders]
        example = captured.example[axes[0][0]].shape[axes[0][1]] if axes else 0

        def runs(size: int, axes: list[Axis] = axes) -> bool:
            ordered = {axis: captured.example[axis[0]].shape[axis[1]] for pair in source.length_order for axis in pair}
            sizes = in_order({**ordered, **dict.fromkeys(axes, size)}, source.length_order)
            return attempt(source.module, resized(_sized(captured.example, axes, size), sizes)).first is not None

        if example > 1 and not runs(1) and runs(example):
            captured.needed.update(dict.fromkeys(axes, least_size(runs, example)))


def _refuse_other_path(
    captured: CapturedGraph,
    source: Source,
    axes: list[tuple[str, int]],
    size: int,
    line: str,
    may_fail: bool = False,
    below: bool = False,
) -> None:
    """Raise UnsupportedModelError if the graph does not give the results of forward at a size of these axes.

    may_fail: whether the graph may fail there. below: whether all smaller sizes take the other path too. A size at
    which forward fails has no results, and a random model is refused later, for its reason.
    """
    inputs = _sized(captured.example, axes, size)
    expected = attempt(source.module, inputs).first
    if expected is None or _gives(captured, inputs, expected, may_fail):
        return
    again = attempt(source.module, inputs).first
    if again is None or not is_same(again, expected):
        return
    (name, axis), *_ = axes
    unit = "rows" if axis == 0 else "positions"
    where = f"has fewer than {size + 1} {unit}" if below else f"has {size} {unit}"
    raise OtherPathError(
        f"forward takes another execution path if {name!r} {where}"
        + (f", by {line}" if line else "")
        + ". A file has one execution path: write it without the branch",
        (name, axis),
        size,
        line,
    )


def sizes_below(least: int) -> list[int]:
    """Return sizes below this one, the greatest first: the `DENSE_SIZES` next to either end, and some between them."""
    between = range(DENSE_SIZES, least - DENSE_SIZES, max(1, (least - 2 * DENSE_SIZES) // BETWEEN))
    return sorted({*range(1, min(DENSE_SIZES, least)), *between, *range(max(1, least - DENSE_SIZES), least)})[::-1]


def gives_at(captured: CapturedGraph, source: Source, lengths: Iterable[int]) -> bool:
    """Return whether the graph gives the outputs of forward for random sequences of these lengths.

    Cost: a run of forward and one of the graph for each length, with two rows.
    """
    name = captured.step_name or ""
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        inputs = {n: value[:2] for n, value in captured.example.items()}
        step = inputs[name]
        shape = (*step.shape[:1], length, *step.shape[2:])
        inputs[name] = (
            torch.randn(shape, generator=generator).to(step.dtype)
            if step.is_floating_point()
            else torch.randint(count_ids(captured, name), shape, generator=generator).to(step.dtype)
        )
        expected = attempt(source.module, inputs).first
        if expected is None or not _gives(captured, inputs, expected, may_fail=False):
            return False
    return True


def gives(captured: CapturedGraph, source: Source, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the graph gives the first output of forward for these inputs, or forward fails for them."""
    expected = attempt(source.module, inputs).first
    return expected is None or _gives(captured, inputs, expected, may_fail=False)


def _gives(captured: CapturedGraph, inputs: Mapping[str, torch.Tensor], expected: torch.Tensor, may_fail: bool) -> bool:
    try:
        actual = run(captured, inputs)[captured.output]
    except (RuntimeError, IndexError, AssertionError):
        return may_fail
    if actual.shape != expected.shape or not expected.is_floating_point():
        return actual.shape == expected.shape and bool((actual == expected).all())
    greatest = expected[expected.isfinite()].max() if expected.isfinite().any() else expected.new_zeros(())
    is_hidden = expected < greatest - HIDDEN
    seen = expected[expected.isfinite() & ~is_hidden]
    span = float(seen.max() - seen.min()) if seen.numel() else 0.0
    allowed = torch.where(is_hidden, TOLERANCE * expected.abs(), TOLERANCE * (span or 1.0))
    same = (actual == expected) | ((actual - expected).abs() <= allowed) | (actual.isnan() & expected.isnan())
    return bool(same.all())


def stretch(inputs: Mapping[str, torch.Tensor], source: Source, length: int) -> dict[str, torch.Tensor]:
    """Return inputs in which those axes that are longer than the example's have this length."""
    longer = [
        (name, axis)
        for name, value in inputs.items()
        for axis in range(1, value.dim())
        if value.shape[axis] > source.example[name].shape[axis]
    ]
    return resized(inputs, dict.fromkeys(longer, length))


def _sized(inputs: Mapping[str, torch.Tensor], axes: list[tuple[str, int]], size: int) -> dict[str, torch.Tensor]:
    """Return inputs of which these axes have another size, with one row unless that is the axis."""
    rows = {name: value if axes[0][1] == 0 else value[:1] for name, value in inputs.items()}
    return resized(rows, dict.fromkeys(axes, size))


def _length_axes(captured: CapturedGraph, symbol: Any) -> list[tuple[str, int]]:
    """Return the inputs and their axes of the length that a symbol stands for, those of the symbol first.

    An input and its padding mask may have two symbols. They have one size in the trace, and no other length has it.
    """
    places = [(n, a, s) for n, node in captured.inputs.items() for a, s in _axes(node) if a > 0 and s.is_Symbol]
    sizes = {captured.example[name].shape[axis] for name, axis, s in places if s == symbol}
    places.sort(key=lambda place: place[2] != symbol)
    return [(name, axis) for name, axis, _ in places if captured.example[name].shape[axis] in sizes]


def _axes(node: Node) -> list[tuple[int, Any]]:
    return [(axis, expression(size)) for axis, size in enumerate(meta(node).shape)]


def refuse_short_limits(captured: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError if the file would hold fewer positions of an input than the example has."""
    for name, node in captured.inputs.items():
        for axis, size in enumerate(meta(node).shape):
            limit = captured.limits.get(expression(size))
            length = source.example[name].shape[axis]
            if limit is not None and limit < length:
                line = captured.limit_lines.get(expression(size))
                raise UnsupportedModelError(
                    f"forward takes another execution path if {name!r} has more than {limit} positions"
                    + (f", by {line}" if line else "")
                    + f", and the example has {length}. A file has one execution path: write it without the branch. If "
                    f'the input always has this size, say so: axes={{"{name}": (0,)}}'
                )
