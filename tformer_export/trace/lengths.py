"""The ways to a graph that holds for as many lengths as forward takes, in their order.

    at any length        after a run of forward on the example, so that no value that forward keeps comes from the trace
    without that run     for a table that forward makes again when it needs a longer one
    after a longer run   for such a table, which then has the greatest length
    above the limit      for a branch, such as `if window >= time`: the path of longer inputs is traced, and
                         compared with forward at shorter ones
    by example alone     for a number that Python makes of a size, such as `int(np.ceil(size / 4))`: the trace has that
                         of the example
    at one length        a module that runs at the greatest length for any sequence, whose results are cut

All but the first and the last are for a graph with a limit beyond which forward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from tformer_export.capture.at_one_length import at_one_length
from tformer_export.capture.trace import CapturedGraph, capture
from tformer_export.common.fx_nodes import DENSE_SIZES, expression, meta, source_line
from tformer_export.common.option_values import DEFAULT_MAX_LENGTH
from tformer_export.soundness.determinism import ForwardRefusedError, warm_up
from tformer_export.soundness.size_branches import gives_at, refuse_paths_beyond, runs_beyond, stretch
from tformer_export.soundness.step_checks import check_stated_ids
from tformer_export.sources import Source
from tformer_export.trace.ways import BY_EXAMPLE, WAYS, TraceRequest, Tried, Way, first_accepted
from tformer_runtime.base.errors import UnsupportedModelError


def trace_source(source: Source, hidden_states: Sequence[str] = (), max_length: int | None = None) -> CapturedGraph:
    """Trace a source, with the outputs of the submodules `hidden_states`.

    If each trace has a limit beyond which forward runs, the first one is returned.

    max_length: the longest sequence; None for the default.

    Raises UnsupportedModelError for a model that cannot be traced, OptionError for special ids that it cannot have.
    """
    longest = max_length or source.max_length or DEFAULT_MAX_LENGTH
    return first_accepted(LENGTHS, TraceRequest(source, hidden_states, max_length, longest))


def _traced(ways: Sequence[Way], request: TraceRequest) -> CapturedGraph:
    try:
        return first_accepted(ways, request)
    except ForwardRefusedError as error:  # `at one length` may still trace it
        raise UnsupportedModelError(str(error)) from error.__cause__


def _at_any_length(request: TraceRequest, tried: Tried) -> CapturedGraph:
    check_stated_ids(request.source, warm_up(request.source, request.source.example))
    return _traced(WAYS, request)


def _holds_beyond(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    return not runs_beyond(graph, request.source)


def _again(request: TraceRequest, tried: Tried) -> CapturedGraph:
    return _traced(WAYS, request)


def _after_a_longer_run(request: TraceRequest, tried: Tried) -> CapturedGraph:
    assert tried.graph is not None
    passed = runs_beyond(tried.graph, request.source)
    warm_up(request.source, stretch(passed, request.source, request.longest))
    return _traced(WAYS, request)


def _above_the_limit(request: TraceRequest, tried: Tried) -> CapturedGraph | None:
    assert tried.graph is not None
    limit = _limit(tried.graph, request)
    return _traced(WAYS, replace(request, above=limit)) if limit else None


def _by_example_alone(request: TraceRequest, tried: Tried) -> CapturedGraph:
    return _traced(BY_EXAMPLE, request)


def _limit(graph: CapturedGraph, request: TraceRequest) -> int:
    return max((limit for limit in graph.limits.values() if limit < request.longest), default=0)


def _holds_again(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    assert tried.graph is not None
    refuse_paths_beyond(graph, request.source, tried.graph)
    return not runs_beyond(graph, request.source, request.longest)


def _holds_above(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    assert tried.graph is not None
    return _holds_again(graph, request, tried) and not _grows(tried.graph, graph)


def _grows(shorter: CapturedGraph, longer: CapturedGraph) -> bool:
    """Return whether a model that is stepped over does more at longer lengths: more rounds of a loop, or more blocks.

    Staging runs the operations at few positions, where the further rounds and blocks do not show.
    """
    if longer.time is None:
        return False
    counts = [Counter((n.target, source_line(n)) for n in graph.nodes) for graph in (shorter, longer)]
    tensors = [meta(node) for node in longer.nodes if isinstance(meta(node), torch.Tensor)]
    sizes = [expression(size) for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    return any(counts[1][key] > count for key, count in counts[0].items()) or any(
        longer.time in size.free_symbols and not size.is_polynomial(longer.time) for size in sizes
    )


def _at_one_length(request: TraceRequest, tried: Tried) -> CapturedGraph | None:
    """Trace a module that runs at the greatest length for any sequence; None if its results are not the source's."""
    source, longest, limited = request.source, request.longest, tried.graph
    if limited is not None:
        required = request.max_length or source.max_length
        if required is None or (limited.time_limit or required) >= required:
            return None
    step = source.step_input
    if request.hidden_states or step is None or source.masks or source.example[step].dim() < 2:
        return None
    if limited is None:
        warm_up(source, source.example)
    module = at_one_length(source.module, source.example, step, longest)
    if module is None:
        return None
    graph = capture(module, source.example, step, source.axes, source.outputs[1:], source.min_drawn_length)
    if graph.time is None or graph.branch_refusal is not None:
        return None
    graph.limits[graph.time] = longest
    graph.at_one_length = True
    return graph


def _holds_at_lengths(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    """Raise UnsupportedModelError unless the graph gives the results of forward at some lengths."""
    longest = request.longest
    lengths = {*range(1, DENSE_SIZES), longest // 3, longest // 2 + 1, longest - 1, longest}
    if not gives_at(graph, request.source, sorted(n for n in lengths if 0 < n <= longest)):
        raise UnsupportedModelError("forward gives other results at one length")
    return True


LENGTHS = (
    Way("at any length", _at_any_length, _holds_beyond),
    Way("without that run", _again, _holds_again, after_a_graph=True),
    Way("after a longer run", _after_a_longer_run, _holds_again, after_a_graph=True),
    Way("above the limit", _above_the_limit, _holds_above, after_a_graph=True),
    Way("by example alone", _by_example_alone, _holds_again, after_a_graph=True),
    Way("at one length", _at_one_length, _holds_at_lengths),
)
