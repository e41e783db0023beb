"""Loops over positions as recurrences: the states that they carry, and the loops that are none."""

from __future__ import annotations

import pytest
import torch
from support.hand_graphs import BATCH, WIDTH, hand_graph, numbers, plan_of, solver_of
from torch import nn

from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.capture.scan import Scan
from tformer_export.common.fx_nodes import meta
from tformer_export.staging.recurrence import find_recurrence
from tformer_runtime import UnsupportedModelError

TIME = 6


def gru_cell(state, row, w_input, w_state):
    new = torch.gru_cell(row, state, w_input, w_state)
    return [new, new * 2]


def looped(body, function, constants=(), num_states=1, num_sequences=1, results=None):
    """Return a graph that ends in a loop, and its node.

    function: x and the constants → the operands of the loop.
    results: those of the loop, one for each of its operands that has the same form; by default one sequence, and the
        last states.
    """
    captured = hand_graph(function, constants)
    operands = [captured.output, *captured.extras.values()]
    graph = captured.graph
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        node = graph.call_function(Scan(body, num_states, num_sequences), tuple(operands))
    forms = results or [num_states, *range(num_states)]
    node.meta["val"] = [meta(operands[i]) for i in forms]
    output.args = ((node,),)
    captured.output, captured.extra_names = node, ()
    return captured, node


def gru(function=lambda x, w, u: (torch.zeros(x.shape[0], WIDTH), x.relu().transpose(0, 1), w, u)):
    return looped(gru_cell, function, [numbers(3 * WIDTH, WIDTH, seed=1), numbers(3 * WIDTH, WIDTH, seed=2)])


# -- loops that are decoded by their states ----------------------------------------------------------------------------


def test_state_after_a_part_continues_the_loop_as_torch_does():
    """torch.nn.GRU gives the results of the whole; the loop runs over it in three parts."""
    captured, node = gru()
    (state,) = find_recurrence(solver_of(captured), node).states
    assert (state.initial, state.rows, state.result, state.dtype) == (None, BatchAxis(0), 1, torch.float32)
    w_input, w_state = captured.constants.values()
    layer = nn.GRU(WIDTH, WIDTH, bias=False, batch_first=True)
    layer.load_state_dict({"weight_ih_l0": w_input, "weight_hh_l0": w_state})
    x = numbers(BATCH, TIME, WIDTH, seed=3).relu()
    carried, parts = torch.zeros(BATCH, WIDTH), []
    for rows in x.split([1, 3, 2], 1):
        result = node.target(carried, rows.transpose(0, 1), w_input, w_state)
        carried = result[state.result]
        parts.append(result[0].transpose(0, 1))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(parts, 1), layer(x)[0] * 2)


def test_solution_needs_new_rows_alone():
    captured, node = gru()
    solver = solver_of(captured)
    plan = plan_of(solver)
    assert solver.solutions[node, ((0, "new"),)].recurrence.states
    assert plan.looking_back == {node}
    assert solver.cuts == {}


def test_initial_state_of_the_model_is_kept():
    def with_learned_state(x, w, u, first):
        return first.expand(x.shape[0], WIDTH), x.relu().transpose(0, 1), w, u

    weights = [numbers(3 * WIDTH, WIDTH, seed=i) for i in (1, 2)]
    captured, node = looped(gru_cell, with_learned_state, [*weights, numbers(1, WIDTH, seed=4)])
    (state,) = find_recurrence(solver_of(captured), node).states
    assert state.initial is node.args[0]


def test_state_with_merged_heads_has_entries_of_each_row():
    """The state of linear attention, (batch · heads, d, d), and its sum of keys."""

    def body(matrix, total, keys, queries):
        matrix, total = matrix + keys[:, :, None] * keys[:, None], total + keys
        return [matrix, total, (queries[:, None] @ matrix)[:, 0]]

    def operands(x):
        rows = x.relu().unflatten(2, (2, 2)).permute(1, 0, 2, 3).flatten(1, 2)  # (time, batch · heads, d)
        batch = x.shape[0] * 2
        return torch.zeros(batch, 2, 2), torch.zeros(batch, 2), rows, rows * 2

    captured, node = looped(body, operands, num_states=2, num_sequences=2, results=[2, 0, 1])
    states = find_recurrence(solver_of(captured), node).states
    assert [(state.rows, state.result) for state in states] == [(BatchAxis(0, 2, True), 1), (BatchAxis(0, 2, True), 2)]


# -- loops that are not ------------------------------------------------------------------------------------------------


def reversed_rows(x, w, u):
    return torch.zeros(x.shape[0], WIDTH), x.relu().transpose(0, 1).flip(0), w, u


def rows_of_another_axis(x, w, u):
    return torch.zeros(x.shape[1], WIDTH), x.relu(), w, u


def state_of_the_tokens(x, w, u):
    return x.sum(1), x.relu().transpose(0, 1), w, u


def weights_of_the_tokens(x, w, u):
    return torch.zeros(x.shape[0], WIDTH), x.relu().transpose(0, 1), w * x.mean(), u


def padded_rows(x, w, u):
    rows = torch.cat([torch.zeros_like(x[:, :1]), x.relu()], 1)
    return torch.zeros(x.shape[0], WIDTH), rows.transpose(0, 1), w, u


NO_RECURRENCES = {
    "a state of the tokens": state_of_the_tokens,
    "weights of the tokens": weights_of_the_tokens,
    "a sequence of rows of the batch": rows_of_another_axis,
    "a sequence with a row that is not a position": padded_rows,
}


@pytest.mark.parametrize("title", NO_RECURRENCES)
def test_loop_over_other_values_is_none(title):
    captured, node = gru(NO_RECURRENCES[title])
    assert find_recurrence(solver_of(captured), node) is None


def test_loop_whose_rows_are_not_those_of_the_states_is_none():
    """A state that counts positions is the same for all rows of a batch: it has no axis for them."""

    def count(state, row):
        return [state + 1, row * state]

    captured, node = looped(count, lambda x: (torch.zeros(WIDTH), x.relu().transpose(0, 1)))
    assert find_recurrence(solver_of(captured), node) is None


def test_loop_that_keeps_a_number_of_its_own_does_not_continue():
    """A body that counts its runs gives other results if it begins in the middle."""

    class Counting:
        runs = 0

        def __call__(self, state, row):
            self.runs += 1
            return [state + row, state * (self.runs % 5)]

    captured, node = looped(Counting(), lambda x: (torch.zeros(x.shape[0], WIDTH), x.relu().transpose(0, 1)))
    assert find_recurrence(solver_of(captured), node) is None


def test_other_operations_are_no_loops():
    captured = hand_graph(lambda x: x.cumsum(1))
    assert find_recurrence(solver_of(captured), captured.output) is None


def test_reversed_loop_is_refused():
    captured, _ = gru(reversed_rows)
    with pytest.raises(UnsupportedModelError, match="looks ahead"):
        plan_of(solver_of(captured))
