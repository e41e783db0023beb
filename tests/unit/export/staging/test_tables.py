"""Tables over positions: constants are proven to be tables, and rows are read back at any positions."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support.hand_graphs import hand_graph, plan_of, solver_of
from support.small_models import LENGTH, Mixer, Small, causal, joined, staged

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.batch_axes import BatchAxis
from tformer_export.common import onnx_operators
from tformer_export.staging.tables import Table, make_tables
from tformer_runtime import UnsupportedModelError

POSITIONS = torch.tensor([[0, 3, 4], [7, 1, 2]])  # (batch, new): each row has other positions
SLOTS = torch.arange(8)


def distances(length):
    position = torch.arange(length)
    return (position[None, :] - position[:, None]).float()


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
TOEPLITZ = {
    "causal mask": CAUSAL,
    "additive causal mask": torch.zeros(8, 8).masked_fill(~CAUSAL, -math.inf),
    "sliding window": CAUSAL & ~CAUSAL.tril(-3),
    "distances for each head": distances(8) * torch.tensor([0.5, 0.25])[:, None, None],
}


@pytest.mark.parametrize("values", TOEPLITZ.values(), ids=TOEPLITZ)
def test_diagonals_are_read_at_any_positions(values):
    axes = (values.dim() - 2, values.dim() - 1)
    table = Table(values, axes, None)
    missing = 4 - values.dim()  # a bias has (batch, heads, new, slots)
    diagonals = table.diagonals(missing, 0)
    assert diagonals.shape[0] == 15
    actual = onnx_operators.table_diagonals(diagonals, POSITIONS, SLOTS, 0, 2, 3)
    torch.testing.assert_close(actual, expected_at(values, POSITIONS), equal_nan=True)


@pytest.mark.parametrize("values", [*TOEPLITZ.values(), torch.randn(2, 8, 8)], ids=[*TOEPLITZ, "any"])
def test_rows_are_read_at_any_positions(values):
    table = Table(values, (values.dim() - 2, values.dim() - 1), None)
    rows = table.rows(4 - values.dim(), 0, 2)
    torch.testing.assert_close(onnx_operators.table_rows(rows, POSITIONS, 0, 2), expected_at(values, POSITIONS))


def expected_at(values, positions):
    """Return (batch, heads, new, slots), looked up one by one."""
    values = values if values.dim() == 3 else values[None]
    return torch.stack([torch.stack([values[:, p] for p in row], 1) for row in positions.tolist()])


def test_table_of_one_axis_is_read_at_any_positions():
    values = torch.randn(1, 8, 5)
    rows = Table(values, (1,), BatchAxis(0)).rows(0, 0, 1)
    torch.testing.assert_close(onnx_operators.table_rows(rows, POSITIONS, 0, 1), values[0][POSITIONS])


def test_other_matrices_have_no_diagonals():
    values = CAUSAL.clone()
    values[5, 2] = False
    assert Table(values, (0, 1), None).diagonals(2, 0) is None
    assert Table(torch.randn(8, 8), (0, 1), None).diagonals(2, 0) is None


@pytest.mark.parametrize(
    ("values", "causal_only"),
    [
        (TOEPLITZ["causal mask"], True),
        (TOEPLITZ["additive causal mask"], True),
        (TOEPLITZ["sliding window"], False),
        (TOEPLITZ["distances for each head"], False),
        (torch.where(CAUSAL, 0.0, -1e9), True),
        (torch.where(CAUSAL, 1.0, -1e9), False),
    ],
)
def test_purely_causal_masks_are_recognised(values, causal_only):
    assert Table(values, (values.dim() - 2, values.dim() - 1), None).causal_only is causal_only


class Causal(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=causal(x)))


class RotaryAndDistances(Mixer):
    """Rotary positions of queries and keys, and a bias by distance."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        q, k = (h * cos + torch.cat([-h[..., 4:], h[..., :4]], -1) * sin for h in (q, k))
        position = torch.arange(x.shape[1])
        bias = torch.where(causal(x), (position[None, :] - position[:, None]) * 0.1, -math.inf)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


@functools.cache
def stage_once(mixer):
    return staged(Small(mixer))


def make_tables_of(mixer, max_length=None, preferred_length=None):
    stages_of_model = stage_once(mixer)
    tables, length = make_tables(
        stages_of_model.solver,
        stages_of_model.plan.tables,
        stages_of_model.plan.length_invariant,
        max_length,
        preferred_length,
    )
    return list(tables.values()), length


def test_length_is_limited_by_position_table():
    for max_length, preferred_length, expected in (
        (None, None, LENGTH),
        (None, 25, 25),
        (33, None, 33),
        (LENGTH, None, LENGTH),
    ):
        tables, length = make_tables_of(Causal, max_length, preferred_length)
        assert length == expected
        assert all(table.values.shape[axis] == expected for table in tables for axis in table.time_axes)
    with pytest.raises(UnsupportedModelError, match=str(LENGTH + 1)):
        make_tables_of(Causal, max_length=LENGTH + 1)


def test_tables_are_position_embedding_and_mask():
    tables, _ = make_tables_of(Causal, 12)
    masks = [t.values for t in tables if t.values.dtype == torch.bool]
    assert len(masks) == 1
    assert torch.equal(masks[0], torch.ones(12, 12, dtype=torch.bool).tril())
    others = [t.values for t in tables if t.values.dtype != torch.bool]
    assert len(others) == 1
    assert torch.equal(others[0], Small(Causal).position[:12])


def test_rotary_tables_and_distance_bias_are_tables():
    tables, length = make_tables_of(RotaryAndDistances, 30)
    assert length == 30
    biases = [t for t in tables if len(t.time_axes) == 2]
    assert len(biases) == 1
    assert biases[0].diagonals(2, 0) is not None
    assert not biases[0].causal_only
    angles = [t.values for t in tables if len(t.time_axes) == 1 and t.values.shape[-1] == 8]
    expected = torch.arange(30)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001] * 2)
    for function in (torch.cos, torch.sin):
        assert sum(torch.allclose(values, function(expected), atol=1e-5) for values in angles) == 1


# -- constants of small graphs -----------------------------------------------------------------------------------------


def tables_of(function, constants=(), required=None, preferred=None, limit=None):
    """Return a solver of a small graph, its tables and the maximum length."""
    captured = hand_graph(function, constants)
    if limit is not None:
        captured.limits[captured.time], captured.limit_lines[captured.time] = limit, "model.py:7"
    solver = solver_of(captured)
    plan = plan_of(solver)
    return solver, *make_tables(solver, plan.tables, plan.length_invariant, required, preferred)


def test_table_with_a_row_of_each_entry_of_the_batch_is_stored_for_one_row():
    """Positions of both rows of a batch, (batch, time, width), and of batch and heads merged."""

    def positioned(x):
        position = torch.arange(x.shape[1]).sqrt()[None, :, None].expand(x.shape[0], -1, 1)
        heads = position.expand(-1, -1, 2).transpose(1, 2).flatten(0, 1)  # (batch · heads, time)
        return (x * position).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1) * heads[..., None].exp()

    _, tables, _ = tables_of(positioned, required=9)
    merged, one = tables.values()
    expected = torch.arange(9).sqrt()
    assert (one.batch_rows, one.time_axes) == (BatchAxis(0), (1,))
    torch.testing.assert_close(one.values, expected[None, :, None])
    assert merged.batch_rows is None  # all entries are equal
    torch.testing.assert_close(merged.values, expected.exp()[None, :, None])


def test_table_that_differs_between_entries_of_a_row_keeps_all_of_them():
    def positioned(x):
        slope = torch.arange(1, 3)[None, :, None].expand(x.shape[0], -1, x.shape[1])
        bias = (slope * torch.arange(x.shape[1])).flatten(0, 1)  # (batch · heads, time)
        return x.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1) + bias[..., None]

    _, tables, _ = tables_of(positioned, required=9)
    (table,) = tables.values()
    assert table.batch_rows == BatchAxis(0, 2, True)
    assert torch.equal(table.values[..., 0], torch.outer(torch.arange(1, 3), torch.arange(9)))


def rows_of_the_batch(x):
    return x + torch.arange(x.shape[1])[None, :, None] * torch.arange(x.shape[0])[:, None, None]


def counted_from_the_end(x):
    return x + torch.arange(x.shape[1] - 1, -1, -1)[:, None]


def normalised_by_length(x):
    return x * torch.ones(x.shape[1]).sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (rows_of_the_batch, "differs from row to row"),
        (counted_from_the_end, "a table whose values change with the length"),
        (normalised_by_length, "a number that changes with the length"),
        (lambda x: x + (torch.arange(x.shape[1]) / x.shape[1])[:, None], "a table whose values change"),
    ],
)
def test_constant_that_is_no_table_is_refused(function, words):
    with pytest.raises(UnsupportedModelError, match=words):
        tables_of(function, required=20)


def test_number_that_changes_at_a_greater_length_limits_the_length():
    """The factor of x is 1 up to a length of 24."""
    solver, _, length = tables_of(lambda x: x * (1 + x.shape[1] // 25), preferred=100)
    assert solver.captured.limits[solver.time] == 24
    assert length == 24


def test_table_that_changes_at_a_greater_length_limits_the_length():
    def positioned(x):
        position = torch.arange(x.shape[1])
        return x + (position + torch.clamp(torch.ones(x.shape[1]).sum() - 30, min=0))[:, None]

    _, tables, length = tables_of(positioned, preferred=100)
    assert length == 30
    (table,) = tables.values()
    assert torch.equal(table.values[:, 0], torch.arange(30.0))


def test_distances_from_the_end_are_counted_from_the_beginning():
    """A bias of keys by their distance from the last position: softmax sees differences alone."""

    def biased(x):
        time = x.shape[1]
        bias = torch.arange(time).float().flip(0).neg()[None].expand(time, -1)
        bias = bias.masked_fill(~torch.ones(time, time, dtype=torch.bool).tril(), -math.inf)
        heads = x.unsqueeze(1)
        return ATTENTION(heads, heads, heads, bias, 1.0, 0.0)

    _, tables, _ = tables_of(biased, required=9)
    (table,) = tables.values()
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = torch.arange(9.0)[None].expand(9, -1).masked_fill(~seen, -math.inf)
    assert torch.equal(table.values, expected)


def scaled_from_the_middle(x):
    """Queries and keys are scaled from the middle of the sequence. Their products depend on the distance alone."""
    position = torch.arange(x.shape[1]) - torch.ones(x.shape[1]).sum() / 2
    scale = 1.02 ** position[:, None]
    scores = (x * scale) @ (x / scale).transpose(1, 2)
    return scores.masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -math.inf).softmax(-1) @ x


def test_tables_that_change_are_taken_if_the_results_are_the_same():
    _, tables, length = tables_of(scaled_from_the_middle, required=20)
    assert length == 20
    scales = [table.values for table in tables.values() if table.values.is_floating_point()]
    expected = 1.02 ** (torch.arange(20) - 10.0)
    assert all(torch.allclose(values[:, 0], expected) for values in scales)
    assert scales


def test_length_beyond_the_limit_is_refused_with_its_line():
    with pytest.raises(UnsupportedModelError, match=r"length of 31: at most 30 is possible, by model\.py:7"):
        tables_of(lambda x: x + torch.arange(x.shape[1])[:, None], required=31, limit=30)
    _, _, length = tables_of(lambda x: x + torch.arange(x.shape[1])[:, None], limit=30)
    assert length == 30


def test_length_beyond_a_stored_table_is_refused():
    def looked_up(x, table):
        return x + table.index_select(0, torch.arange(x.shape[1]))

    _, tables, length = tables_of(looked_up, [torch.randn(17, 4)])
    assert length == 17
    assert [table.values.shape for table in tables.values()] == [(17, 4)]
    with pytest.raises(UnsupportedModelError, match="its position tables end before"):
        tables_of(looked_up, [torch.randn(17, 4)], required=18)
