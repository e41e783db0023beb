"""The roles of operands: solved on small graphs, and compared with rows that torch computes of longer inputs."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from support.hand_graphs import BATCH, SOURCE_LENGTH, WIDTH, causal, hand_graph, numbers, plan_of, solver_of, the_node
from torch.fx import Node
from torch.utils import _pytree as pytree

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.analysis.interpreter import run
from tformer_export.common.fx_nodes import aten, meta
from tformer_export.staging.layouts import PLAIN, Layout
from tformer_export.staging.restriction import ALL, ARANGE, BROADCAST, NEW, is_close
from tformer_runtime import UnsupportedModelError

SOURCE = numbers(BATCH, SOURCE_LENGTH, WIDTH, seed=1)
WEIGHT = numbers(WIDTH, WIDTH, seed=2)
LENGTH = 9
WINDOWS = (0, 1), (0, 3), (4, 1), (4, 5), (8, 1)  # (first position, how many) of LENGTH; the solver tries others


def scores(x):
    return (x @ x.transpose(1, 2)).masked_fill(~causal(x.shape[1]), -math.inf)


# -- solve -------------------------------------------------------------------------------------------------------------

SOLVED = {  # title: (function of x and the source, operation, roles of the result, choices of the operands)
    "each position alone": (lambda x, _: x.relu(), aten.relu.default, {1: NEW}, [{1: NEW}]),
    "all positions": (lambda x, _: x.relu(), aten.relu.default, {1: ALL}, [{1: ALL}]),
    "queries and keys": (
        lambda x, _: x.relu() @ x.sigmoid().transpose(1, 2),
        aten.matmul.default,
        {1: NEW, 2: ALL},
        [{1: NEW}, {2: ALL}],
    ),
    "weights and values": (
        lambda x, _: scores(x).softmax(-1) @ x.relu(),
        aten.matmul.default,
        {1: NEW},
        [{1: NEW, 2: ALL}, {1: ALL}],
    ),
    "softmax over keys": (lambda x, _: scores(x).softmax(-1), aten.softmax.int, {1: NEW, 2: ALL}, [{1: NEW, 2: ALL}]),
    "table of positions": (
        lambda x, _: x + torch.arange(x.shape[1]).sqrt()[:, None],
        aten.add.Tensor,
        {1: NEW},
        [{1: NEW}, {0: NEW}],
    ),
    "table of queries and keys": (
        lambda x, _: torch.where(causal(x.shape[1]), x @ x.transpose(1, 2), 0.0),
        aten.where.ScalarOther,
        {1: NEW, 2: ALL},
        [{0: NEW, 1: ALL}, {1: NEW, 2: ALL}],
    ),
    "numbers from 0": (
        lambda x, _: x.relu().index_select(1, torch.arange(x.shape[1])),
        aten.index_select.default,
        {1: NEW},
        [{1: NEW}, None, ARANGE],
    ),
    "one row for all positions": (
        lambda x, source: x * source.mean(1, True).expand(-1, x.shape[1], -1),
        aten.mul.Tensor,
        {1: NEW},
        [{1: NEW}, BROADCAST],
    ),
    "the source has no roles": (
        lambda x, source: x.relu() @ source.transpose(1, 2),
        aten.matmul.default,
        {1: NEW},
        [{1: NEW}, None],
    ),
}


def choice_of(axes):
    return tuple(axes.items()) if isinstance(axes, dict) else axes


def cut_out(values, node, choice, window):
    """Return an operand in the form of a choice, out of the values of the whole graph at several lengths."""
    first, count = window
    if choice == ARANGE:
        return values[count][node]
    if isinstance(meta(node), torch.SymInt):
        return values[first + count if choice and choice[0][1] == ALL else count][node]
    value = values[LENGTH][node]
    if choice == BROADCAST:
        return value[:, :1]
    for axis, role in choice or ():
        value = value.narrow(axis, *((first, count) if role == NEW else (0, first + count)))
    return value


def assert_computes_rows(captured, solution, roles):
    """Run a solution on cut operands of a longer input. Its result has to be the same rows of the whole result."""
    inputs = {"x": numbers(BATCH, LENGTH, WIDTH, seed=3), "source": SOURCE}
    values = {n: run(captured, {**inputs, "x": inputs["x"][:, :n]}) for n in range(1, LENGTH + 1)}
    for window in WINDOWS:
        results: dict[Node, torch.Tensor] = {}
        for node, choices in solution.parts:
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            operands = [
                leaf
                if not isinstance(leaf, Node)
                else results[leaf]
                if leaf in results
                else cut_out(values, leaf, choice, window)
                for leaf, choice in zip(leaves, choices, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(operands, spec)
            results[node] = node.target(*args, **kwargs)
        last = solution.nodes[-1]
        torch.testing.assert_close(results[last], cut_out(values, last, roles, window))


@pytest.mark.parametrize("title", SOLVED)
def test_operands_are_needed_in_these_roles(title):
    function, target, roles, expected = SOLVED[title]
    captured = hand_graph(function, inputs={"x": numbers(BATCH, 6, WIDTH), "source": SOURCE})
    node = [n for n in captured.nodes if n.target is target][-1]
    solution = solver_of(captured).solve(node, choice_of(roles))
    assert solution.nodes == (node,)
    assert list(solution.choices[0])[: len(expected)] == [choice_of(choice) for choice in expected]
    assert_computes_rows(captured, solution, choice_of(roles))


def test_operations_that_restore_an_order_are_one_region():
    def sorted_and_restored(x):
        order = x[..., 0].argsort(1)
        rows = x.gather(1, order[..., None].expand_as(x)).tanh()
        return rows.gather(1, order.argsort(1)[..., None].expand_as(x))

    captured = hand_graph(sorted_and_restored)
    solver = solver_of(captured)
    solution = solver.solve(captured.output, ((1, NEW),))
    assert len(solution.nodes) > 3
    assert not any(choice == ((1, ALL),) for _, choice in solution.operands())
    assert_computes_rows(captured, solution, ((1, NEW),))


def test_position_that_only_the_other_rows_read_is_needed():
    """A position reads the positions of its own id. The ids of the first run are all different."""

    def mean_of_the_same(x):
        same = (x[:, :, None] == x[:, None, :]) & causal(x.shape[1])
        return same.float() @ x[..., None].expand(-1, -1, WIDTH).float()

    different = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    repeated = torch.stack([different[0], torch.tensor([1, 1, 2, 1, 2, 1])])
    captured = hand_graph(mean_of_the_same, inputs={"x": different})
    assert solver_of(captured, different, repeated).solve(captured.output, ((1, NEW),)).choices == (
        (((1, NEW), (2, ALL)), ((1, ALL),)),
    )
    assert solver_of(captured, different, different).solve(captured.output, ((1, NEW),)).choices == (
        (((1, NEW), (2, NEW)), ((1, NEW),)),
    )


def test_solution_is_found_once():
    captured = hand_graph(lambda x: x.relu())
    solver = solver_of(captured)
    assert solver.solve(captured.output, ((1, NEW),)) is solver.solve(captured.output, ((1, NEW),))


def shuffled(x):
    return x.gather(1, x[..., :1].argsort(1).expand_as(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "looks ahead"),
        (lambda x: x.flip(1), "looks ahead"),
        (lambda x: x.roll(-1, 1), "looks ahead"),
        (lambda x: x + x.mean(1, True), "step_input=None"),
        (shuffled, "`gather`.* looks ahead"),
        (lambda x: x + torch.rand_like(x), "something else each time"),
        (lambda x: x[x > 0], "size depends on the data"),
    ],
)
def test_operation_that_mixes_positions_is_refused(function, words):
    solver = solver_of(hand_graph(function))
    with pytest.raises(UnsupportedModelError, match=words):
        plan_of(solver)


# -- layouts, and rows of them -----------------------------------------------------------------------------------------

ROW = numbers(1, 1, WIDTH, seed=4)
LAYOUTS = {  # title: (function of x and a row, time axis of the result, its layout)
    "plain": (lambda x, _: x.relu(), 1, PLAIN),
    "time and batch": (lambda x, _: x.transpose(0, 1).relu().flatten(0, 1), 0, Layout(stride=BATCH)),
    "batch and time": (lambda x, _: x.relu().flatten(0, 1), 0, PLAIN),
    "time and width": (lambda x, _: x.relu().flatten(1, 2), 1, Layout(stride=WIDTH)),
    "a row in front": (lambda x, row: torch.cat([row.expand(BATCH, 1, WIDTH), x.relu()], 1), 1, Layout(front=1)),
    "a row behind": (lambda x, row: torch.cat([x.relu(), row.expand(BATCH, 1, WIDTH)], 1), 1, Layout(back=1)),
    "two rows in front and one behind": (
        lambda x, row: torch.cat([*[row.expand(BATCH, 1, WIDTH)] * 2, x.relu(), row.expand(BATCH, 1, WIDTH)], 1),
        1,
        Layout(front=2, back=1),
    ),
}


@pytest.mark.parametrize("title", LAYOUTS)
@pytest.mark.parametrize("role", [NEW, ALL])
def test_rows_of_a_layout_are_those_of_shorter_inputs(title, role):
    """A window of the values is the result for the window's rows of the input."""
    function, axis, layout = LAYOUTS[title]
    captured = hand_graph(function, [ROW])
    solver, node = solver_of(captured), captured.output
    assert solver.layout(node, axis) == layout
    for first, count in ((0, 2), (2, 3), (5, 1)):
        rows = slice(first if role == NEW else 0, first + count)
        torch.testing.assert_close(
            solver.restrict(node, ((axis, role),), (first, count)), function(captured.example["x"][:, rows], ROW)
        )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(front=1), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (Layout(back=1), [[1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]),
    ],
)
def test_mask_with_a_further_column_has_a_layout(layout, expected):
    def ordered(column, rest):
        return [column, rest] if layout.front else [rest, column]

    def masked(x):
        column = torch.ones(x.shape[1], 1, dtype=torch.bool)
        seen = torch.cat(ordered(column, causal(x.shape[1])), 1)
        return torch.where(seen, torch.cat(ordered(x[..., :1], x @ x.transpose(1, 2)), 2), -math.inf)

    captured = hand_graph(masked)
    solver = solver_of(captured)
    seen = next(n for n in captured.nodes if n.target is aten.cat.default and meta(n).dim() == 2)
    assert [solver.layout(seen, axis) for axis in (0, 1)] == [PLAIN, layout]
    assert solver.restrict(seen, ((0, NEW), (1, ALL)), (2, 2)).int().tolist() == expected


def test_shuffled_rows_have_no_layout():
    captured = hand_graph(lambda x: x.flatten(0, 1)[x.flatten(0, 1)[:, 0].argsort()])
    solver = solver_of(captured)
    assert captured.output in solver.unknown_layouts
    with pytest.raises(UnsupportedModelError, match="merged with another"):
        solver.cut(captured.output)


def test_constants_and_sizes_are_computed_for_other_numbers_of_positions():
    captured = hand_graph(lambda x: x.relu() * torch.arange(x.shape[1]).sqrt()[:, None] + x.shape[1] * x.shape[0])
    solver = solver_of(captured)
    (table,) = (n for n in captured.nodes if n.target is aten.sqrt.default)
    assert torch.equal(solver.fresh(table, 3), torch.arange(3).sqrt())
    size = the_node(captured, operator.mul)
    assert solver.size(size, 5) == 5 * BATCH
    assert [solver.operand(size, ((0, role),), (2, 3)) for role in (NEW, ALL)] == [3 * BATCH, 5 * BATCH]


# -- cuts and rows of the batch ----------------------------------------------------------------------------------------


def test_value_is_cached_before_its_heads_are_repeated():
    captured = hand_graph(lambda x: x.relu().unsqueeze(1).expand(-1, 3, -1, -1).transpose(2, 3).exp() + 0)
    solver = solver_of(captured)
    cut = solver.cut(the_node(captured, aten.transpose.int))
    assert torch.equal(solver.values[cut].squeeze(1), captured.example["x"].relu())
    assert solver.cut(captured.output) is captured.output  # exp changes the numbers
    assert solver.cuts == {cut: 2, captured.output: 3}


def test_value_with_an_axis_of_the_source_is_not_cached():
    inputs = {"x": numbers(BATCH, 6, WIDTH), "source": SOURCE}
    captured = hand_graph(lambda x, source: x @ source.transpose(1, 2), inputs=inputs)
    solver = solver_of(captured)
    assert solver.free_axes(captured.output) == [2]
    with pytest.raises(UnsupportedModelError, match="another input"):
        solver.cut(captured.output)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: x.relu(), BatchAxis(0)),
        (lambda x: x.transpose(0, 2) * 2, BatchAxis(2)),
        (lambda x: x.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1) * 2, BatchAxis(0, 2, True)),
        (lambda x: x.unflatten(2, (2, 2)).permute(2, 0, 1, 3).flatten(0, 1) * 2, BatchAxis(0, 2, False)),
        (lambda x: x.isnan().unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1), BatchAxis(0, 2, True)),
        (lambda x: x.mean(0), None),
    ],
)
def test_axis_of_the_rows_of_a_batch_is_found(function, rows):
    """The last but one is false for all rows of numbers."""
    captured = hand_graph(function)
    assert solver_of(captured).rows(captured.output) == rows


# -- is_close ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "expected", "close"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([0.0, 1e6], [10.0, 1e6], True),  # rounding is of the range of the values
        ([0.0, -3e38], [1.0, -3e38], False),  # a number that hides a position is not in that range
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([math.inf, 1.0], [1.0, 1.0], False),
        ([math.nan, 1.0], [math.nan, 1.00001], True),
        ([math.nan, 1.0], [math.inf, 1.0], False),
        ([1, 2], [1, 3], False),
        ([1, 2], [1, 2], True),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_results_are_equal_up_to_rounding(result, expected, close):
    assert is_close(torch.tensor(result), torch.tensor(expected)) is close
    assert is_close([torch.ones(1), torch.tensor(result)], [torch.ones(1), torch.tensor(expected)]) is close
    assert not is_close(7, torch.tensor(expected))
