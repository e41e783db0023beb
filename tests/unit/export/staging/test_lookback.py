"""Operations that read earlier positions: how far, and rows that they give from carried rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.hand_graphs import BATCH, WIDTH, hand_graph, numbers, plan_of, solver_of
from torch.nn import functional as F

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.interpreter import run
from tformer_export.common.fx_nodes import meta
from tformer_export.staging.lookback import Lookback, find_lookback
from tformer_runtime import UnsupportedModelError

KERNEL = numbers(WIDTH, WIDTH, 3, seed=1)
ROW = numbers(1, 1, WIDTH, seed=2)
SPARSE = torch.zeros(WIDTH, WIDTH, 31)
SPARSE[..., [0, 27, 30]] = KERNEL  # rows 30 and 3 positions back, and the present one


def convolved(x, kernel, padding=(2, 0), dilation=1):
    return F.conv1d(F.pad(x.relu().transpose(1, 2), padding), kernel, dilation=dilation).transpose(1, 2)


def after_a_row(x, row):
    """Each position reads the position before it, and the first one a learned row."""
    return torch.cat([row.expand(x.shape[0], 1, WIDTH), x.relu()], 1)[:, :-1] * x.relu()


def sums_of_blocks(x, _):
    """Each position reads the positions of its block of three so far."""
    padded = F.pad(x.relu(), (0, 0, 0, -x.shape[1] % 3))
    return padded.unflatten(1, (-1, 3)).cumsum(2).flatten(1, 2)[:, : x.shape[1]]


BOUNDED = {  # title: (function of x and a constant, constant, positions back, whether a constant is before the first)
    "convolution": (lambda x, w: convolved(x, w), KERNEL, 2, False),
    "dilated convolution": (lambda x, w: convolved(x, w, (10, 0), 5), KERNEL, 10, False),
    "widely dilated convolution": (lambda x, w: convolved(x, w, (16, 0), 8), KERNEL, 16, False),
    "widely dilated convolution with padding on both sides": (
        lambda x, w: F.conv1d(x.relu().transpose(1, 2), w, padding=14, dilation=7)[..., :-14].transpose(1, 2),
        KERNEL,
        14,
        False,
    ),
    "shift by more positions than the probe has": (
        lambda x, _: F.pad(x.relu(), (0, 0, 9, 0))[:, : x.shape[1]],
        ROW,
        9,
        False,
    ),
    "convolution of near and far rows": (lambda x, w: convolved(x, w, (30, 0)), SPARSE, 30, False),
    "shift": (
        lambda x, _: torch.cat([x.new_zeros(x.shape[0], 4, WIDTH), x.relu()], 1)[:, : x.shape[1]],
        ROW,
        4,
        False,
    ),
    "difference": (lambda x, _: x.relu() - F.pad(x.relu(), (0, 0, 1, -1)), ROW, 1, False),
    "shift with a learned row": (after_a_row, ROW, 1, True),
}


def planned(function, constant):
    """Return a graph and the region in it that looks back."""
    captured = hand_graph(function, [constant])
    solver = solver_of(captured)
    plan_of(solver)
    (lookback,) = [s.lookback for s in solver.solutions.values() if s.lookback is not None]
    return captured, lookback


def read_by(captured, lookback, x):
    """Return the values that a region reads, by node, for these inputs of the graph."""
    values = run(captured, {"x": x})
    inside = set(lookback.nodes)
    return {n: values[n] for node in lookback.nodes for n in node.all_input_nodes if n not in inside}


def run_region(lookback, operands):
    results = dict(operands)
    for node in lookback.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), results.__getitem__)
        results[node] = node.target(*args, **kwargs)
    return results[lookback.nodes[-1]].movedim(lookback.axis, 1)


def is_sequence(captured, node):
    return isinstance(meta(node), torch.Tensor) and binding_times(captured)[node] == Level.STEP


@pytest.mark.parametrize("title", BOUNDED)
def test_carried_rows_and_new_rows_give_the_new_rows_of_the_result(title):
    """The rows before the first position are zeros, or the constant."""
    function, constant, back, has_constant = BOUNDED[title]
    captured, lookback = planned(function, constant)
    assert (lookback.rows, lookback.period, lookback.initial is not None) == (back, None, has_constant)
    x = numbers(BATCH, 48, WIDTH, seed=3)
    for first, count in ((0, 1), (0, 5), (1, 2), (2, 1), (11, 5), (44, 3)):  # no length is that of another axis
        operands = read_by(captured, lookback, x[:, : back + count])  # constants and sizes have this length
        for node, value in read_by(captured, lookback, x[:, : first + count]).items():
            if is_sequence(captured, node):
                axis = value.shape.index(first + count)
                rows = value.movedim(axis, 1)
                before = constant.expand(BATCH, back, WIDTH) if has_constant else torch.zeros(BATCH, back, WIDTH)
                operands[node] = torch.cat([before, rows], 1)[:, -(back + count) :].movedim(1, axis)
        whole = run(captured, {"x": x[:, : first + count]})[lookback.nodes[-1]].movedim(lookback.axis, 1)
        torch.testing.assert_close(run_region(lookback, operands)[:, back:], whole[:, first:])


def test_blocks_are_computed_from_the_start_of_a_block():
    captured, lookback = planned(sums_of_blocks, ROW)
    assert (lookback.rows, lookback.period) == (4, 3)
    x = numbers(BATCH, 20, WIDTH, seed=3)
    expected = x.relu().clone()  # by hand: sums over the block so far
    for i in range(20):
        expected[:, i] = x.relu()[:, i - i % 3 : i + 1].sum(1)
    for first, count in ((0, 2), (1, 1), (4, 1), (7, 5), (12, 3)):
        offset = int(lookback.offset(torch.tensor(first)))
        (sequence,) = (n for n in read_by(captured, lookback, x) if is_sequence(captured, n))
        rows = x.relu()[:, first - offset : first + count]
        rows = torch.cat([rows, rows[:, -1:].expand(-1, 4 - offset, -1)], 1)  # as many as are carried, and the new ones
        result = run_region(lookback, {**read_by(captured, lookback, x[:, : 4 + count]), sequence: rows})
        torch.testing.assert_close(result[:, offset : offset + count], expected[:, first : first + count])


def test_start_of_each_row_is_a_multiple_of_the_period():
    """The start is the latest multiple that is rows − period + 1 positions or more before the first new one."""
    lookback = Lookback((), 1, rows=7, period=4)
    firsts = np.arange(30)
    starts = np.array([max((s for s in range(0, 40, 4) if s <= first - 4), default=0) for first in firsts])
    assert (firsts - lookback.offset(torch.from_numpy(firsts)).numpy() == starts).all()


@pytest.mark.parametrize(
    "function", [lambda x, _: x.relu().cumsum(1), lambda x, _: x.relu().cummax(1).values, lambda x, _: x.cumprod(1)]
)
def test_running_result_has_no_limit(function):
    _, lookback = planned(function, ROW)
    assert (lookback.rows, lookback.period, lookback.axis) == (None, None, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: convolved(x, w, (1, 1)),
        lambda x, w: convolved(x, w, (0, 2)),
        lambda x, _: x.relu().flip(1),
        lambda x, _: x.relu().cumsum(1).flip(1),
        lambda x, _: x.relu() - x.relu().mean(1, True),
    ],
)
def test_operation_that_reads_later_positions_is_refused(function):
    with pytest.raises(UnsupportedModelError, match="looks ahead"):
        planned(function, KERNEL)


def test_rows_that_are_put_in_front_and_dropped_again_are_not_carried():
    """Eight registers in front of the sequence, as many as a shift would have."""

    def registered(x, row):
        return (torch.cat([row.expand(x.shape[0], 8, WIDTH), x.relu()], 1).exp() * 2)[:, 8:]

    solver = solver_of(hand_graph(registered, [ROW]))
    plan = plan_of(solver)
    assert (plan.looking_back, solver.cuts) == (set(), {})


def test_attention_between_registers_and_their_removal_has_a_cache():
    """A window of attention over eight registers and the sequence, which could be carried too."""

    def attended(x, row):
        rows = torch.cat([row.expand(x.shape[0], 8, WIDTH), x.relu()], 1).unsqueeze(1)
        seen = torch.ones(rows.shape[2], rows.shape[2], dtype=torch.bool)
        return ATTENTION(rows, rows * 2, rows, seen.tril() & ~seen.tril(-3), 0.5, 0.0).squeeze(1)[:, 8:]

    solver = solver_of(hand_graph(attended, [ROW]))
    assert plan_of(solver).looking_back == set()
    assert solver.cuts


@pytest.mark.parametrize("function", [lambda x, _: x.relu().sum(1), lambda x, _: x.relu().flatten(0, 1)])
def test_result_without_an_axis_of_positions_does_not_look_back(function):
    captured = hand_graph(function, [ROW])
    assert find_lookback(solver_of(captured), captured.output) is None


@pytest.mark.parametrize(("back", "limit", "rows"), [(20, None, 20), (300, None, 300), (600, None, None), (20, 16, 0)])
def test_shift_is_found_beyond_the_first_lengths_of_the_search(back, limit, rows):
    """A shift of more than half of the greatest length of the search has no limit. One beyond the sequence is zeros."""

    def shifted(x, _):
        return torch.cat([x.new_zeros(x.shape[0], back, WIDTH), x.relu()], 1)[:, : x.shape[1]]

    captured = hand_graph(shifted, [ROW])
    if limit is not None:
        captured.limits[captured.time] = limit
    assert find_lookback(solver_of(captured), captured.output).rows == rows
