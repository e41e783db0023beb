"""Loops over positions in recordings are found and become one operation; other repetitions do not."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tformer_export.capture.by_example.find_loops import Loop, find_loops
from tformer_export.capture.by_example.recording import Step
from tformer_export.capture.by_example.recording_inputs import RecordingInputs
from tformer_export.capture.by_example.trace import trace_by_example
from tformer_export.capture.by_example.unify import DisagreementError, LoopError
from tformer_export.capture.scan import Scan
from tformer_export.capture.trace import lines_of_helpers_recorded

WIDTH, MAX_LENGTH = 4, 24

# -- find_loops --------------------------------------------------------------------------------------------------------


def recording(lines: str):
    """Return a recording with one operation for each letter, whose line the letter is."""
    return SimpleNamespace(steps=[Step(operator.add, (), {}, line) for line in lines])


def loops_of(*lines: str) -> list[list[Loop]]:
    """Return the loops of recordings of two rows and three or more positions."""
    return find_loops([recording(x) for x in lines], [(2, 3 + i) for i in range(len(lines))])


def test_loop_is_found_with_its_body_and_its_runs():
    assert loops_of("a" + 3 * "bc" + "d", "a" + 4 * "bc" + "d") == [
        [Loop(end=7, period=2, count=3, slack=0)],
        [Loop(end=9, period=2, count=4, slack=0)],
    ]


def test_loop_may_be_first_and_last():
    assert loops_of("bcd" * 3, "bcd" * 4) == [[Loop(9, 3, 3, 0)], [Loop(12, 3, 4, 0)]]


def test_several_loops_are_found():
    found = loops_of("a" + "b" * 3 + "c" + "de" * 3 + "b" * 3, "a" + "b" * 4 + "c" + "de" * 4 + "b" * 4)
    assert found[0] == [Loop(4, 1, 3, 0), Loop(11, 2, 3, 0), Loop(14, 1, 3, 0)]
    assert [loop.end for loop in found[1]] == [5, 14, 18]


def test_loop_of_layers_in_a_loop_over_positions_is_one_body():
    layers = "xyxy"
    assert loops_of("a" + layers * 3 + "c", "a" + layers * 4 + "c")[0] == [Loop(13, 4, 3, 0)]


def test_loop_over_layers_is_no_loop():
    assert loops_of("a" + "bc" * 6 + "d", "a" + "bc" * 6 + "d") == [[], []]


def test_operations_before_a_loop_that_are_those_of_its_end_are_counted():
    assert loops_of("c" + "bc" * 3 + "d", "c" + "bc" * 4 + "d")[0] == [Loop(7, 2, 3, 1)]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("abcbcbcd", "abcbcbxd"),  # another operation
        ("abcbcbcd", "abcbcbcbd"),  # half a body more
        ("abbbc", "abbbbbc"),  # two runs more for one position
        ("abbcbbc", "abbbcbbbcbbbc"),  # a loop in a loop, both over positions
        ("abcd", "abxcd"),  # an operation that is not repeated
    ],
)
def test_other_differences_are_no_loops(short, long):
    with pytest.raises(DisagreementError):
        loops_of(short, long)


def test_loops_of_two_recordings_have_one_body():
    with pytest.raises(DisagreementError):
        loops_of("a" + "bc" * 3 + "d", "a" + "bc" * 4 + "d", "a" + "bcbc" * 3 + "d")


# -- roll --------------------------------------------------------------------------------------------------------------


class Loops(nn.Module):
    """Runs a function over (batch, time, width)."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.cell, self.layers = nn.GRUCell(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.both = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True, num_layers=2)
        self.training = False

    def forward(self, x):
        return self.function(self, x)


def traced(function):
    """Return the module of a function, the module that is traced by example, and the loops of that."""
    module = Loops(function).eval()
    draws = RecordingInputs({"x": torch.randn(2, 5, WIDTH)}, [[("x", 0)], [("x", 1)]], None)
    with lines_of_helpers_recorded():
        rebuilt = trace_by_example(module, draws, 1, MAX_LENGTH)
    assert rebuilt is not None
    return module, rebuilt, [n.target for n in rebuilt.graph_module.graph.nodes if isinstance(n.target, Scan)]


def moving_average(module, x):
    mean, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        mean = 0.5 * mean + x[:, t]
        rows.append(mean)
    return torch.stack(rows, 1)


def backwards(module, x):
    state, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in reversed(range(x.shape[1])):
        state = module.cell(x[:, t], state)
        rows.append(state)
    return torch.stack(rows[::-1], 1)


def last_state(module, x):
    state = x.new_zeros(x.shape[0], WIDTH)
    for row in x.unbind(1):
        state = module.cell(row, state)
    return state


def written_rows(module, x):
    state, output = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        output[:, t, :] = state
        state = (state + x[:, t]).tanh()
    return output


def changed_in_place(module, x):
    mean, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        mean.mul_(0.7).add_(x[:, t], alpha=0.3)
        rows.append(mean.clone())
    return torch.stack(rows, 1)


def states_before(module, x):
    state, rows = torch.ones(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        rows.append(state)
        state = (state + x[:, t]).tanh()
    return torch.stack(rows, 1)


def joined_slices(module, x):
    state, rows = torch.ones(x.shape[0], 1, WIDTH), []
    for t in range(x.shape[1]):
        state = state * x[:, t : t + 1].sigmoid()
        rows.append(state)
    return torch.cat(rows, 1)


def windows(module, x):
    padded, state, rows = torch.cat([x[:, :1], x[:, :1], x], 1), torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = state / 2 + padded[:, t : t + 3].amax(1)
        rows.append(state)
    return torch.stack(rows, 1)


def loop_after_loop(module, x):
    state, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = module.cell(x[:, t], state)
        rows.append(state)
    first_rows, rows, total = rows, [], 0 * state
    for row in first_rows:
        total = total + row.exp()
        rows.append(total.log())
    return torch.stack(rows, 1)


def two_values(module, x):
    numerator, denominator, rows = torch.zeros(x.shape[0], WIDTH), torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        weight = x[:, t].exp()
        numerator, denominator = numerator + weight * x[:, t], denominator + weight
        rows.append(numerator / denominator)
    return torch.stack(rows, 1)


def layers_in_a_loop(module, x):
    states, rows = [torch.zeros(x.shape[0], WIDTH) for _ in module.layers], []
    for t in range(x.shape[1]):
        row = x[:, t]
        for i, layer in enumerate(module.layers):
            states[i] = row = (layer(row) + states[i]).tanh()
        rows.append(row)
    return torch.stack(rows, 1)


def rows_mapped(module, x):
    return torch.stack([module.layers[0](row) for row in x.unbind(1)], 1)


def layer_of_torch(module, x):
    return module.both(x)[0]


ROLLED = [  # function, and the numbers of states and sequences of its loops
    (moving_average, [(1, 1)]),
    (backwards, [(1, 1)]),
    (last_state, [(1, 1)]),
    (written_rows, [(1, 1)]),
    (changed_in_place, [(1, 1)]),
    (states_before, [(1, 1)]),
    (rows_mapped, [(0, 1)]),
    (joined_slices, [(1, 1)]),
    (windows, [(1, 1)]),
    (loop_after_loop, [(1, 1), (1, 1)]),
    (two_values, [(2, 1)]),
    (layers_in_a_loop, [(3, 1)]),
    (layer_of_torch, [(1, 1)] * 4),
]


@pytest.mark.parametrize(("function", "forms"), ROLLED, ids=[function.__name__ for function, _ in ROLLED])
def test_loop_over_positions_becomes_one_operation(function, forms):
    module, rebuilt, loops = traced(function)
    assert [(loop.num_states, loop.num_sequences) for loop in loops] == forms
    for batch, time in ((1, 1), (3, 4), (2, 17)):
        x = torch.randn(batch, time, WIDTH)
        with torch.no_grad():
            actual, *_ = rebuilt(x)
            torch.testing.assert_close(actual, module(x), rtol=1e-5, atol=1e-5)


def test_loop_over_layers_stays_a_list_of_operations():
    def layers(module, x):
        for layer in module.layers:
            x = x + layer(x)
        return x[:, torch.arange(x.shape[1])]

    _, rebuilt, loops = traced(layers)
    assert not loops
    assert sum(n.target is torch.ops.aten.linear.default for n in rebuilt.graph_module.graph.nodes) == 3


def growing(module, x):
    seen, rows = x[:, :0], []
    for t in range(x.shape[1]):
        seen = torch.cat([seen, x[:, t : t + 1]], 1)
        rows.append(seen.amax(1))
    return torch.stack(rows, 1)


def numbers_that_differ(module, x):
    state, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = state * 0.9**t + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


def run_before_the_run_before(module, x):
    older = old = torch.zeros(x.shape[0], WIDTH)
    rows = []
    for t in range(x.shape[1]):
        older, old = old, (older + x[:, t]).tanh()
        rows.append(old)
    return torch.stack(rows, 1)


def first_apart(module, x):
    state, rows = None, []
    for t in range(x.shape[1]):
        state = x[:, t] if state is None else 0.9 * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


def parts_written(module, x):
    state, rows = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state[:, 1:] = (state + x[:, t]).tanh()[:, :-1]
        rows.append(state.clone())
    return torch.stack(rows, 1)


REFUSED = [
    (growing, "a value has another shape in each run"),
    (numbers_that_differ, "a number differs from run to run"),
    (run_before_the_run_before, "it reads a value that is neither a row of this position nor of the run before"),
    (first_apart, "its first position is computed apart, so one position alone has no run"),
    (parts_written, "it writes into a part of a tensor"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=[function.__name__ for function, _ in REFUSED])
def test_loop_with_another_body_is_refused_with_the_reason(function, reason):
    with pytest.raises(LoopError, match=reason) as caught:
        traced(function)
    assert f"in {function.__name__}" in (caught.value.stack_trace or "")
