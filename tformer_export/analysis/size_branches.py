"""Branches on sizes, such as `if positions.max() + 1 > self.max_length:`.

torch.export cannot follow these branches, because it has no values. The model is then traced with the example's values.
It goes the example's way and asserts the conditions of that way. These assertions are evaluated at other lengths, and
the greatest length for which they hold becomes a limit of the file. A branch that depends on data stays refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import Constants, run
from tformer_export.capture.graph_cleanup import drop_assertions
from tformer_export.capture.trace import CapturedGraph, count_ids
from tformer_export.capture.trace_errors import explain_branch
from tformer_export.common.fx_nodes import DENSE_SIZES, aten, expression, meta, source_line
from tformer_export.common.module_state import WriteUndo, unchanged
from tformer_export.sources.base import Source
from tformer_runtime.base.errors import UnsupportedModelError

TOLERANCE = 1e-3  # of the range of the outputs; another course differs by more


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


def runs_beyond(captured: CapturedGraph, source: Source, enough: int = 2**31) -> dict[str, torch.Tensor]:
    """Return inputs on which forward runs, and of which one is longer than a limit of the graph; {} if there are none.

    enough: a limit that is not exceeded. Cost: a run of forward for each limit, with one row.
    """
    for symbol, limit in captured.limits.items():
        axes = [(n, a) for n, node in captured.inputs.items() for a, s in _axes(node) if s == symbol and a > 0]
        if not axes or limit >= enough:
            continue
        inputs = {name: value[:1] for name, value in source.example.items()}
        for name, axis in axes:
            inputs[name] = _resize(inputs[name], axis, limit + 1)
        undo = WriteUndo(source.module, [])
        with torch.no_grad(), unchanged(source.module), undo, torch.random.fork_rng(devices=[]), suppress(Exception):
            source.module(*(value.clone() for value in inputs.values()))
            return inputs
    return {}


def refuse_other_courses(captured: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError if forward takes another course at sizes below those of the trace.

    A trace holds from some size on: `if n < 5` and `max(n - 5, 0)` go the way of the example. Below it, and at size 1,
    the graph is compared with forward.

    Cost: a run of forward and one of the graph, with one row, for each size below the least, at most `DENSE_SIZES`.
    """
    symbols = {s for node in captured.inputs.values() for axis, s in _axes(node) if axis > 0 and s.is_Symbol}
    for symbol in symbols:
        axes = [(n, a) for n, node in captured.inputs.items() for a, s in _axes(node) if s == symbol and a > 0]
        least = captured.least.get(symbol, 2)
        for size in range(least - 1, max(0, least - DENSE_SIZES), -1):
            inputs = {name: value[:1] for name, value in captured.example.items()}
            for name, axis in axes:
                inputs[name] = _resize(inputs[name], axis, size)
            expected = _run(source, inputs)
            if expected is not None and not _gives(captured, inputs, expected, may_fail=least == 2):
                name, line = axes[0][0], captured.least_lines.get(symbol)
                raise UnsupportedModelError(
                    f"forward takes another course if {name!r} has fewer than {size + 1} positions"
                    + (f", by {line}" if line else "")
                    + ". A file takes one course: write it without the branch"
                )


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
        expected = _run(source, inputs)
        if expected is None or not _gives(captured, inputs, expected, may_fail=False):
            return False
    return True


def _run(source: Source, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the first output of forward; None if it fails. The state of the module is restored."""
    undo = WriteUndo(source.module, [])
    with torch.no_grad(), unchanged(source.module), undo, torch.random.fork_rng(devices=[]), suppress(Exception):
        output = source.module(*(value.clone() for value in inputs.values()))
        first = output[0] if isinstance(output, (tuple, list)) else output
        return first if isinstance(first, torch.Tensor) else None
    return None


def _gives(captured: CapturedGraph, inputs: Mapping[str, torch.Tensor], expected: torch.Tensor, may_fail: bool) -> bool:
    try:
        actual = run(captured, inputs)[captured.output]
    except (RuntimeError, IndexError, AssertionError):
        return may_fail
    finite = expected[expected.isfinite()]
    span = float(finite.max() - finite.min()) if finite.numel() and finite.is_floating_point() else 0.0
    allowed = TOLERANCE * (span or 1.0)
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=0, atol=allowed, equal_nan=True)


def stretch(inputs: Mapping[str, torch.Tensor], source: Source, length: int) -> dict[str, torch.Tensor]:
    """Return inputs in which those axes that are longer than the example's have this length."""
    stretched = {}
    for name, value in inputs.items():
        for axis in range(1, value.dim()):
            if value.shape[axis] > source.example[name].shape[axis]:
                value = _resize(value, axis, length)
        stretched[name] = value
    return stretched


def _axes(node: Node) -> list[tuple[int, Any]]:
    return [(axis, expression(size)) for axis, size in enumerate(meta(node).shape)]


def _resize(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    return value.index_select(axis, torch.arange(size) % value.shape[axis])


def refuse_short_limits(captured: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError if the file would hold fewer positions of an input than the example has."""
    for name, node in captured.inputs.items():
        for axis, size in enumerate(meta(node).shape):
            limit = captured.limits.get(expression(size))
            length = source.example[name].shape[axis]
            if limit is not None and limit < length:
                line = captured.limit_lines.get(expression(size))
                raise UnsupportedModelError(
                    f"forward takes another course if {name!r} has more than {limit} positions"
                    + (f", by {line}" if line else "")
                    + f", and the example has {length}. A file takes one course: write it without the branch. If the "
                    f'input always has this size, say so: axes={{"{name}": (0,)}}'
                )
