"""The plan of the decode stage of small graphs: its demands, caches, contexts and tables."""

from __future__ import annotations

import pytest
import torch
from support.hand_graphs import BATCH, SOURCE_LENGTH, WIDTH, causal, hand_graph, numbers, plan_of, solver_of, the_node
from torch.nn import functional as F

from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.interpreter import run
from tformer_export.common.fx_nodes import aten
from tformer_export.staging.restriction import ALL, NEW
from tformer_runtime.format.manifest import ADAPTER_INPUT

X = numbers(BATCH, 6, WIDTH)
SOURCE = numbers(BATCH, SOURCE_LENGTH, WIDTH, seed=1)
WEIGHT = numbers(WIDTH, WIDTH, seed=2)


def attention(q, k, v, bias=None):
    return ATTENTION(q, k, v, causal(q.shape[2]) if bias is None else bias, 0.5, 0.0)


def heads(x, count=2):
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def self_attention(x, weight):
    """Return x + attention(x) with two heads of queries, keys and values, before and after operations of rows."""
    q, k, v = heads(x.relu()), heads(x @ weight), heads(x * 2)
    mixed = attention(q, k, v).transpose(1, 2).flatten(2)
    return (x.relu() + mixed) @ weight


def planned(function, constants=(), inputs=None, fuses=False):
    captured = hand_graph(function, constants, inputs)
    solver = solver_of(captured)
    return captured, solver, plan_of(solver, fuses)


# -- caches ------------------------------------------------------------------------------------------------------------


def test_keys_and_values_are_needed_at_all_positions():
    captured, solver, plan = planned(self_attention, [WEIGHT])
    q, k, v = the_node(captured, ATTENTION).args[:3]
    assert plan.demands[q] == [((2, NEW),)]
    assert plan.demands[k] == plan.demands[v] == [((2, ALL),), ((2, NEW),)]
    assert set(solver.cuts) == {k, v}
    assert plan.fused == {}
    assert plan.demands[captured.output] == [((1, NEW),)]


def test_fused_attention_reads_new_rows_alone():
    captured, solver, plan = planned(self_attention, [WEIGHT], fuses=True)
    node = the_node(captured, ATTENTION)
    cached = plan.fused[node]
    assert (cached.key, cached.value, cached.bias) == (*node.args[1:3], node.args[3])
    assert all(plan.demands[n] == [((2, NEW),)] for n in node.args[:3])
    assert solver.cuts == {}


def test_fused_attention_caches_heads_before_they_are_repeated():
    """Keys and values have one head, which is repeated for two of queries."""

    def grouped(x):
        key, value = (y.unsqueeze(1).expand(-1, 2, -1, -1).contiguous() for y in (x.sin(), x.cos()))
        return attention(torch.stack([x, x.relu()], 1), key, value).sum(1)

    _, solver, plan = planned(grouped, fuses=True)
    (cached,) = plan.fused.values()
    assert torch.equal(solver.values[cached.key], X.sin()[:, None])
    assert torch.equal(solver.values[cached.value], X.cos()[:, None])
    assert not plan.demands.keys() & set(cached.node.args[1:3])


@pytest.mark.parametrize(
    "keys",
    [
        lambda x, source: source.mean(1, True).expand(-1, x.shape[1], -1),  # known for the request
        lambda x, source: torch.cat([torch.zeros_like(x[:, :1]), x.relu()], 1),  # a row that is not a position
    ],
)
def test_attention_over_other_rows_than_positions_is_not_fused(keys):
    def attend(x, source):
        k = heads(keys(x, source))
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        return attention(heads(x), k, k * 2, seen)

    captured, _, plan = planned(attend, inputs={"x": X, "source": SOURCE}, fuses=True)
    assert plan.fused == {}
    assert the_node(captured, ATTENTION) in plan.demands


# -- contexts ----------------------------------------------------------------------------------------------------------


def test_values_of_the_request_are_contexts():
    """Decode reads keys at all positions of the source, and of a gate that is equal at every position one row."""

    def crossed(x, source):
        gate = source.mean(1, True).expand(-1, x.shape[1], -1)
        return x.relu() @ source.sigmoid().transpose(1, 2) @ source.tanh() * gate

    captured, _, plan = planned(crossed, inputs={"x": X, "source": SOURCE})
    keys, gate = (the_node(captured, target) for target in (aten.transpose.int, aten.expand.default))
    assert plan.contexts == {
        (gate, True): None,
        (the_node(captured, aten.tanh.default), False): None,
        (keys, False): None,
    }


def test_values_of_adapters_are_computed_by_decode():
    def adapted(x, numbers_of_adapters, weights):
        return x.relu() @ weights.index_select(0, numbers_of_adapters[:, 0])

    captured, _, plan = planned(
        adapted,
        [numbers(3, WIDTH, WIDTH)],
        {"x": X, ADAPTER_INPUT: torch.tensor([[0], [2]])},
    )
    assert the_node(captured, aten.index_select.default) in plan.of_adapters
    assert plan.contexts == {}


# -- tables ------------------------------------------------------------------------------------------------------------


def test_constants_that_are_indexed_by_position_are_tables():
    def positioned(x, table):
        return (x + table[: x.shape[1]]).index_select(1, torch.arange(x.shape[1])) * torch.ones(x.shape[1]).amax()

    captured, _, plan = planned(positioned, [numbers(30, WIDTH)])
    assert list(plan.tables) == [the_node(captured, aten.slice.Tensor)]
    assert list(plan.length_invariant) == [the_node(captured, aten.amax.default)]


# -- operations that look back, and the place where positions are dropped ----------------------------------------------


def shifted(x, weight):
    return F.pad(x.relu(), (0, 0, 1, -1)) @ weight


@pytest.mark.parametrize(
    ("function", "target", "rows", "role"),
    [(shifted, aten.pad.default, 1, NEW), (lambda x, _: x.relu().cumsum(1).exp(), aten.cumsum.default, None, ALL)],
)
def test_operation_that_reads_earlier_rows_looks_back(function, target, rows, role):
    """Without a limit it reads a cache. With one it reads new rows, and a carry of the rows before them."""
    captured, solver, plan = planned(function, [WEIGHT])
    node = the_node(captured, target)
    assert plan.looking_back == {node}
    assert solver.solutions[node, ((1, NEW),)].lookback.rows == rows
    assert plan.demands[the_node(captured, aten.relu.default)][0] == ((1, role),)


@pytest.mark.parametrize("function", [self_attention, shifted, lambda x, weight: x.relu() @ weight])
def test_rows_may_be_dropped_at_the_selected_value(function):
    """The rest of the graph gives the same for the last position of that value alone."""
    captured, _, plan = planned(function, [WEIGHT])
    values = run(captured, captured.example)
    index = captured.nodes.index(plan.select)
    after = set(captured.nodes[index + 1 :])
    assert not any(node.target is ATTENTION or node in plan.looking_back for node in after)
    kept = dict(values)
    kept[plan.select] = values[plan.select][:, -1:]
    for node in captured.nodes[index + 1 :]:
        if node.op == "call_function":
            kept[node] = node.target(*torch.fx.node.map_arg(node.args, kept.__getitem__))
    torch.testing.assert_close(kept[captured.output], values[captured.output][:, -1:])


def test_selected_value_is_the_first_through_which_all_flows():
    captured, _, plan = planned(self_attention, [WEIGHT])
    assert plan.select is the_node(captured, aten.add.Tensor)
