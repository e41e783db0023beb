"""The loop over ways to a graph: its order, what it keeps, and which error it raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tformer_export.soundness.determinism import ForwardRefusedError
from tformer_export.sources.torch_module import from_module
from tformer_export.trace.lengths import trace_source
from tformer_export.trace.ways import BY_EXAMPLE, WAYS, TraceRequest, Way, first_accepted
from tformer_runtime import UnsupportedModelError


class Counter(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(int(x.shape[1]))
        return x + 1


def request(module=None):
    source = from_module(module or Counter(), {"x": torch.ones(2, 3, 4)}, None)
    return TraceRequest(source, (), None, longest=16)


def graph_of(limit=None):
    """Return a graph, which the loop passes on unread."""
    return ("graph", limit)


def way(name, result, accepts=True, log=None):
    def attempt(request, tried):
        if log is not None:
            log.append(name)
        if isinstance(result, Exception):
            raise result
        return result

    return Way(name, attempt, lambda graph, request, tried: accepts)


def test_first_accepted_graph_ends_the_search():
    log = []
    ways = [way("a", None, log=log), way("b", graph_of(1), log=log), way("c", graph_of(2), log=log)]
    assert first_accepted(ways, request()) == graph_of(1)
    assert log == ["a", "b"]


def test_without_an_accepted_graph_the_first_one_is_kept():
    ways = [way("a", graph_of(1), False), way("b", graph_of(2), False), way("c", UnsupportedModelError("no"))]
    assert first_accepted(ways, request()) == graph_of(1)


def test_first_failure_is_raised_if_no_way_gives_a_graph():
    ways = [way("a", UnsupportedModelError("first")), way("b", None), way("c", UnsupportedModelError("second"))]
    with pytest.raises(UnsupportedModelError, match=r"^first$"):
        first_accepted(ways, request())


def test_error_of_a_check_is_a_failure_of_its_way():
    def refuse(graph, request, tried):
        raise UnsupportedModelError("wrong at 3 positions")

    first = Way("a", lambda request, tried: graph_of(1), refuse)
    assert first_accepted([first, way("b", graph_of(2))], request()) == graph_of(2)
    with pytest.raises(UnsupportedModelError, match="wrong at 3"):
        first_accepted([first], request())


def test_refusal_of_forward_itself_ends_the_search():
    log = []
    ways = [way("a", UnsupportedModelError("a")), way("b", ForwardRefusedError("b")), way("c", graph_of(), log=log)]
    with pytest.raises(ForwardRefusedError, match=r"^b$"):
        first_accepted(ways, request())
    assert log == []


def test_no_way_that_applies_is_an_error_of_its_own():
    with pytest.raises(UnsupportedModelError, match="forward cannot be traced"):
        first_accepted([way("a", None)], request())


def test_attempt_leaves_the_module_unchanged_whether_it_succeeds_or_fails():
    module = Counter()

    def attempt(request, tried):
        request.source.module(torch.ones(2, 5, 4))
        assert module.seen == [5]
        raise UnsupportedModelError("no")

    def second(request, tried):
        assert module.seen == []
        assert float(module.calls) == 0
        request.source.module(torch.ones(2, 6, 4))
        return graph_of()

    def accepts(graph, request, tried):
        return module.seen == []

    wanted = request(module)
    module.seen.clear()
    module.calls.zero_()
    assert first_accepted([Way("a", attempt, accepts), Way("b", second, accepts)], wanted) == graph_of()
    assert float(module.calls) == 0


class LoopsOverPositions(nn.Module):
    """torch.export unrolls the loop for the example's length. By example it becomes one operation."""

    def forward(self, x):
        return torch.stack([x[:, i] * 2 for i in range(x.shape[1])], 1)


def test_loop_over_positions_is_traced_by_example():
    wanted = request(LoopsOverPositions().eval())
    with pytest.raises(UnsupportedModelError):
        first_accepted(WAYS[:1], wanted)
    graph = first_accepted(BY_EXAMPLE, wanted)
    assert "x" in graph.inputs
    assert trace_source(wanted.source).inputs.keys() == graph.inputs.keys()
