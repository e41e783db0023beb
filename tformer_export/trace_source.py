"""From a source to its traced graph: the ways to trace it, and the choice between them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tformer_export.analysis.determinism import (
    check_devices,
    find_foreign_tensor,
    refuse_half,
    refuse_kept_state,
    refuse_random,
    refuse_random_module,
    refuse_scaled_weights,
    rehearse,
    warm_up,
)
from tformer_export.analysis.last_position import keep_all_positions
from tformer_export.analysis.placeholders import place_by_count
from tformer_export.analysis.selected_rows import keep_all_rows
from tformer_export.analysis.size_branches import (
    check_guards,
    find_needed_lengths,
    gives,
    gives_at,
    limit_by_branches,
    limit_by_counted_positions,
    limit_lengths,
    refuse_courses_beyond,
    refuse_other_courses,
    refuse_same_course,
    refuse_short_limits,
    runs_beyond,
    stretch,
)
from tformer_export.analysis.step_checks import check_stated_ids
from tformer_export.capture.at_one_length import at_one_length
from tformer_export.capture.by_example.draws import DataKind, InputDraws
from tformer_export.capture.by_example.input_facts import with_facts
from tformer_export.capture.by_example.proof import FORWARD_FAILURES, asked_ids
from tformer_export.capture.by_example.reads import NoteReads
from tformer_export.capture.by_example.rebuild import RebuiltModule
from tformer_export.capture.by_example.recording import record
from tformer_export.capture.by_example.trace import trace_by_example
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.capture.masked_writes import masked_writes
from tformer_export.capture.submodule_outputs import WithSubmoduleOutputs, find_modules
from tformer_export.capture.trace import CapturedGraph, TraceFailedError, capture
from tformer_export.capture.trace_patches import copies_of_functions_run, lines_of_helpers_recorded
from tformer_export.common.example_sizes import DRAWN_LENGTH_FACTOR, size_groups
from tformer_export.common.fx_nodes import DENSE_SIZES, expression, is_sized_by_data, line_of_trace, meta, source_line
from tformer_export.common.module_state import restored, unchanged
from tformer_export.sources import Source
from tformer_export.sources.call.independent_lengths import separate_lengths
from tformer_export.sources.call.one_row import RowByRow
from tformer_export.staging.tables import DEFAULT_LENGTH
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format.manifest import HIDDEN_STATES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedModel:
    """A source with its traced graph, which gives equal results for equal inputs.

    gives_last: whether the source returns logits of the last position alone. The graph returns logits of all positions.
    """

    source: Source
    graph: CapturedGraph
    gives_last: bool


def capture_model(source: Source, hidden_states: Sequence[str] = (), max_length: int | None = None) -> CapturedModel:
    """Trace a source, with the outputs of the submodules `hidden_states`.

    max_length: the longest sequence; None for the default.

    Raises UnsupportedModelError for a model that cannot be traced, or whose results are not the same for the same
    inputs.
    """
    check_devices(source)
    try:
        with unchanged(source.module):
            check_stated_ids(source, warm_up(source, source.example))
            source = separate_lengths(source)
            graph = trace_source(source, hidden_states, max_length)
        if not graph.at_one_length and (passed := runs_beyond(graph, source)):
            graph = _trace_beyond(source, graph, passed, hidden_states, max_length)
            required = max_length or source.max_length
            if not hidden_states and required is not None and (graph.time_limit or required) < required:
                graph = _trace_at_one_length(source, required) or graph
    except UnsupportedModelError as error:
        rehearse(source)  # if forward fails by itself, report that error instead
        if error.__cause__ is not None:  # of torch.export, which does not say that something is kept
            refuse_kept_state(source)
        raise
    refuse_scaled_weights(source)
    place_by_count(graph)
    refuse_half(graph)
    refuse_random(graph, rehearse(source))
    limit_by_counted_positions(graph, source, max_length or source.max_length or DEFAULT_LENGTH)
    refuse_short_limits(graph, source)
    find_needed_lengths(graph, source)
    return CapturedModel(source, graph, gives_last=keep_all_positions(graph))


def _trace_beyond(
    source: Source,
    traced: CapturedGraph,
    passed: Mapping[str, torch.Tensor],
    hidden_states: Sequence[str],
    max_length: int | None,
) -> CapturedGraph:
    """Trace again where forward runs on longer inputs than the limits of a trace allow.

    - The limit may be that of a table of an earlier run, which forward makes anew when it needs a longer one. So the
      model is traced without one, or else with one of the greatest length.
    - It may be that of a branch, such as `if window >= time`. So the way of longer inputs is traced, and compared with
      forward at shorter ones (`refuse_other_courses`).
    - Python may have made a number of a size, such as `int(np.ceil(size / 4))`, and the trace has that of the example.
      So the model is traced by example.

    If each trace has limits, the first one is returned.

    passed: inputs on which forward runs, and which exceed a limit.
    """
    longest = max_length or source.max_length or DEFAULT_LENGTH
    limit = max((limit for limit in traced.limits.values() if limit < longest), default=0)
    longer = stretch(passed, source, longest)
    for inputs, above, by_example in ((None, 0, False), (longer, 0, False), (None, limit, False), (None, 0, True)):
        with unchanged(source.module), suppress(UnsupportedModelError):
            if inputs is not None:
                warm_up(source, inputs)
            graph = _trace_at_any_length(source, hidden_states, longest, above, by_example)
            refuse_courses_beyond(graph, source, traced)
            if not runs_beyond(graph, source, longest) and not (above and _grows(traced, graph)):
                return graph
    return traced


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


def _trace_at_any_length(
    source: Source, hidden_states: Sequence[str], longest: int, above: int = 0, by_example: bool = False
) -> CapturedGraph:
    """Trace a source by torch.export or, if that fails or is not wanted, by example.

    above: the lengths of the trace exceed this one.
    """
    module, names = source.module, source.outputs[1:]
    if hidden_states:
        watched = find_modules(source.users_module, hidden_states)
        module = WithSubmoduleOutputs(source.module, watched, 1 + len(names))
        module.training = False
        names = (*names, *(f"{HIDDEN_STATES}.{name}" for name in watched))

    def trace(traced: torch.nn.Module) -> CapturedGraph:
        rest = source.axes, names, max(source.min_drawn_length, math.ceil(above / DRAWN_LENGTH_FACTOR))
        with unchanged(source.module):  # a trace that fails may leave its tensors in buffers
            graph = capture(traced, source.example, source.step_input, *rest)
        keep_all_rows(graph)
        limit_by_branches(graph, longest)
        check_guards(graph, source, longest)
        refuse_other_courses(graph, source)
        return graph

    failure: TraceFailedError | UnsupportedModelError = UnsupportedModelError("tracing by example fails")
    with_selected_rows: CapturedGraph | None = None
    if not by_example:
        try:
            graph = trace(module)
            _refuse_hidden_reads(graph, source)
            if not _selects_rows(graph):
                return graph
            with_selected_rows = graph  # staging refuses it; a trace by example keeps a row for every position
        except (TraceFailedError, UnsupportedModelError) as error:
            failure = error
    repeats = rehearse(source).repeats
    if not repeats:
        refuse_random_module(source)
    foreign = find_foreign_tensor(source)
    if foreign is not None and foreign.is_class:
        raise UnsupportedModelError(str(foreign)) from failure.__cause__
    for candidate in (module, RowByRow(module)) if repeats else ():  # the code may loop over the rows
        try:
            rebuilt = _rebuild(candidate, source, longest)
        except LoopError as error:
            raise UnsupportedModelError(explain_loop(error)) from error
        if rebuilt is None:
            continue
        try:
            graph = trace(rebuilt)
            refuse_same_course(graph, source, failure)
        except (TraceFailedError, UnsupportedModelError) as error:
            reason = error.explain() if isinstance(error, TraceFailedError) else error
            logger.debug("the rebuilt module cannot be traced: %s", reason)
            continue
        if rebuilt.max_length is not None:
            limit_lengths(graph, rebuilt.max_length)
        return graph
    if with_selected_rows is not None:
        return with_selected_rows
    if isinstance(failure, TraceFailedError):
        raise UnsupportedModelError(failure.explain() if foreign is None else str(foreign)) from failure.__cause__
    raise failure


def _refuse_hidden_reads(graph: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError if Python reads data that the trace does not, and the graph has other results for it.

    `if not torch.compiler.is_compiling() and (ids == 7).any(): …` is a shortcut in many models, which changes no
    result. It is tried with the ids with which the code compares. Cost: a run of forward; if it reads numbers, three
    more; if they are of data, two of the graph and of forward for each of these ids.
    """
    try:
        with restored(source.module), NoteReads() as reads:
            source.module(*(value.clone() for value in graph.example.values()))
        if not reads.places:
            return
        recording = record(source.module, [*graph.example.values()])
    except FORWARD_FAILURES:  # at the sizes of the trace
        return
    if not (recording.numbers or reads.reads_more) and recording.num_reads == len(reads.places):
        return  # Python reads single numbers of constants alone
    draws = with_facts(_input_draws(source), recording)
    sizes = [graph.example[group[0][0]].shape[group[0][1]] for group in draws.groups]
    for number in sorted({*asked_ids([recording], draws), *draws.paddings}):
        of_number = replace(draws, asked=number)
        if not all(gives(graph, source, of_number.draw(sizes, DataKind(False), seed)) for seed in (0, 1)):
            raise UnsupportedModelError(
                f"forward computes something else while it is traced, or it lets data decide, at {reads.places[0]}. A "
                "file takes the same course for all inputs: choose with torch.where or a mask, or remove the check"
            )


def _selects_rows(graph: CapturedGraph) -> bool:
    """Return whether the size of a value follows from data, as in `x[mask]`."""
    return any(
        is_sized_by_data(
            node.target, (meta(n).dtype for n in node.all_input_nodes[1:] if isinstance(meta(n), torch.Tensor))
        )
        or (isinstance(meta(node), torch.Tensor) and free_unbacked_symbols(meta(node).shape))
        for node in graph.nodes
    )


def trace_source(source: Source, hidden_states: Sequence[str], max_length: int | None = None) -> CapturedGraph:
    """Trace a source at any length or, if that fails, at its greatest length alone."""
    longest = max_length or source.max_length or DEFAULT_LENGTH
    try:
        return _trace_at_any_length(source, hidden_states, longest)
    except UnsupportedModelError:
        graph = None if hidden_states else _trace_at_one_length(source, longest)
        if graph is None:
            raise
        return graph


def _trace_at_one_length(source: Source, longest: int) -> CapturedGraph | None:
    """Trace a module that runs at the greatest length for any sequence; None if its results are not the source's."""
    step = source.step_input
    if step is None or source.masks or source.example[step].dim() < 2:
        return None
    module = at_one_length(source.module, source.example, step, longest)
    if module is None:
        return None
    try:
        with unchanged(source.module):
            names, rest = source.outputs[1:], (source.axes, source.min_drawn_length)
            graph = capture(module, source.example, step, rest[0], names, rest[1])
    except (TraceFailedError, UnsupportedModelError):
        return None
    if graph.time is None or graph.branch_refusal is not None:
        return None
    graph.limits[graph.time] = longest
    graph.at_one_length = True
    lengths = {*range(1, DENSE_SIZES), longest // 3, longest // 2 + 1, longest - 1, longest}
    return graph if gives_at(graph, source, sorted(n for n in lengths if 0 < n <= longest)) else None


def explain_loop(error: LoopError) -> str:
    """Return two sentences about a loop over positions that cannot be written as one operation."""
    line = line_of_trace(error.stack_trace)
    return (
        f"the loop over positions{line and f' at {line}'} cannot be exported: {error}. Each run has to do the same "
        "operations on the rows of its position, on values that all positions share, and on values of the run before, "
        "which keep their shape"
    )


def _rebuild(module: torch.nn.Module, source: Source, max_length: int) -> RebuiltModule | None:
    """Return a module that computes the same and that torch.export can trace; None if there is none."""
    draws = _input_draws(source)
    with lines_of_helpers_recorded(), copies_of_functions_run(), masked_writes():
        return trace_by_example(module, draws, source.min_drawn_length, max_length)


def _input_draws(source: Source) -> InputDraws:
    axes = {name: source.axes.get(name, (0, 1)[: value.dim()]) for name, value in source.example.items()}
    padding = source.special_tokens.pad_token_id
    return InputDraws(
        source.example,
        size_groups(source.example, axes, source.step_input),
        source.step_input,
        source.masks,
        frozenset() if padding is None else frozenset({padding}),
    )
