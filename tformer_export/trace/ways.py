"""The ways to trace forward, in their order, and the loop that tries ways until the graph of one is accepted.

torch.export             as PyTorch traces it; all conditions on sizes are checked
by example               forward runs on examples of many sizes, and a module is rebuilt from what it did
by example, row by row   the same for one row, for code that loops over the rows of a batch
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tformer_export.capture.by_example.trace import trace_by_example
from tformer_export.capture.by_example.unify import LoopError
from tformer_export.capture.masked_writes import masked_writes
from tformer_export.capture.submodule_outputs import WithSubmoduleOutputs, find_modules
from tformer_export.capture.trace import CapturedGraph, TraceFailedError, capture
from tformer_export.capture.trace_patches import copies_of_functions_run, lines_of_helpers_recorded
from tformer_export.common.example_sizes import DRAWN_LENGTH_FACTOR
from tformer_export.common.fx_nodes import is_sized_by_data, line_of_trace, meta
from tformer_export.common.module_state import unchanged
from tformer_export.normalise.selected_rows import keep_all_rows
from tformer_export.soundness.determinism import (
    ForwardRefusedError,
    find_foreign_tensor,
    refuse_random_module,
    rehearse,
)
from tformer_export.soundness.size_branches import (
    check_guards,
    limit_by_branches,
    limit_lengths,
    refuse_other_paths,
    refuse_same_path,
)
from tformer_export.sources import Source
from tformer_export.sources.call.one_row import RowByRow
from tformer_export.trace.hidden_reads import input_draws, refuse_hidden_reads
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format.manifest import HIDDEN_STATES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceRequest:
    """A request for a graph.

    hidden_states: the names of the submodules whose outputs are results too.
    max_length: the longest sequence that was asked for; None for the default.
    longest: the greatest length at which conditions on sizes are evaluated.
    above: the lengths of the trace exceed this one.
    """

    source: Source
    hidden_states: Sequence[str]
    max_length: int | None
    longest: int
    above: int = 0

    @cached_property
    def module(self) -> torch.nn.Module:
        """Return the source's module. It also returns the outputs of `hidden_states`."""
        if not self.hidden_states:
            return self.source.module
        module = WithSubmoduleOutputs(self.source.module, self._watched, len(self.source.outputs[1:]) + 1)
        module.training = False
        return module

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the results after the first one."""
        return (*self.source.outputs[1:], *(f"{HIDDEN_STATES}.{name}" for name in self._watched))

    @cached_property
    def _watched(self) -> dict[str, torch.nn.Module]:
        return find_modules(self.source.users_module, self.hidden_states) if self.hidden_states else {}

    def capture(self, module: torch.nn.Module) -> CapturedGraph:
        """Trace `module`, which computes what `self.module` computes.

        Raises TraceFailedError, UnsupportedModelError.
        """
        source = self.source
        min_length = max(source.min_drawn_length, math.ceil(self.above / DRAWN_LENGTH_FACTOR))
        return capture(module, source.example, source.step_input, source.axes, self.outputs, min_length)


@dataclass
class Tried:
    """The results of the ways before a way.

    graph: the first graph that was not accepted.
    failure: the first error, or the foreign tensor that explains it.
    repeats: whether forward gives the same results for the same inputs.
    """

    graph: CapturedGraph | None = None
    failure: TraceFailedError | UnsupportedModelError | None = None
    repeats: bool = True


@dataclass(frozen=True)
class Way:
    """A way to a graph.

    attempt: returns a graph, or None if the way does not apply. The state of the module is restored after it.
    accepts: returns whether to take the graph. The first graph that is not taken is returned if no way gives a better
        one. Both raise TraceFailedError or UnsupportedModelError if the way fails.
    after_a_graph: whether the way is for a graph that was not accepted, and not tried without one.
    """

    name: str
    attempt: Callable[[TraceRequest, Tried], CapturedGraph | None]
    accepts: Callable[[CapturedGraph, TraceRequest, Tried], bool]
    after_a_graph: bool = False


def first_accepted(ways: Sequence[Way], request: TraceRequest) -> CapturedGraph:
    """Return the graph of the first way whose graph is accepted; else the first graph.

    Raises the first error if no way gives a graph. A ForwardRefusedError ends the search.
    """
    tried = Tried()
    for way in ways:
        if way.after_a_graph and tried.graph is None:
            continue
        try:
            with unchanged(request.source.module):  # a trace that fails may leave its tensors in buffers
                graph = way.attempt(request, tried)
            if graph is None:
                continue
            if way.accepts(graph, request, tried):
                return graph
            tried.graph = tried.graph or graph
        except ForwardRefusedError:
            raise
        except (TraceFailedError, UnsupportedModelError) as error:
            logger.debug("%s: %s", way.name, error.__cause__ or error)  # explaining it may trace the module again
            tried.failure = tried.failure or error
    if tried.graph is not None:
        return tried.graph
    failure = tried.failure or UnsupportedModelError("forward cannot be traced by example")
    if isinstance(failure, TraceFailedError):
        with unchanged(request.source.module):
            reason = failure.explain()
        raise UnsupportedModelError(reason) from failure.__cause__
    raise failure


# -- torch.export ------------------------------------------------------------------------------------------------------


def _export(request: TraceRequest, tried: Tried) -> CapturedGraph:
    return request.capture(request.module)


def _accepts_export(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    """Return whether data select no rows. Staging refuses such a graph. By example, every position keeps a row."""
    _check(graph, request)
    refuse_hidden_reads(graph, request.source)
    return not _selects_rows(graph)


def _check(graph: CapturedGraph, request: TraceRequest) -> None:
    """Set the limits of a graph, in place. Raises UnsupportedModelError if forward takes another path at a size."""
    keep_all_rows(graph)
    limit_by_branches(graph, request.longest)
    check_guards(graph, request.source, request.longest)
    refuse_other_paths(graph, request.source)


def _selects_rows(graph: CapturedGraph) -> bool:
    """Return whether the size of a value follows from data, as in `x[mask]`."""
    return any(
        is_sized_by_data(
            node.target, (meta(n).dtype for n in node.all_input_nodes[1:] if isinstance(meta(n), torch.Tensor))
        )
        or (isinstance(meta(node), torch.Tensor) and free_unbacked_symbols(meta(node).shape))
        for node in graph.nodes
    )


# -- by example --------------------------------------------------------------------------------------------------------


def _example(request: TraceRequest, tried: Tried) -> CapturedGraph | None:
    source = request.source
    try:
        tried.repeats = rehearse(source).repeats
    except UnsupportedModelError as error:
        raise ForwardRefusedError(str(error)) from error.__cause__
    if not tried.repeats:
        refuse_random_module(source)
    _refuse_foreign_tensors(source, tried)
    return _rebuilt(request.module, request) if tried.repeats else None


def _example_of_rows(request: TraceRequest, tried: Tried) -> CapturedGraph | None:
    return _rebuilt(RowByRow(request.module), request) if tried.repeats else None


def _rebuilt(module: torch.nn.Module, request: TraceRequest) -> CapturedGraph | None:
    """Trace the module that is rebuilt by example; None if there is none."""
    source = request.source
    try:
        with lines_of_helpers_recorded(), copies_of_functions_run(), masked_writes():
            rebuilt = trace_by_example(module, input_draws(source), source.min_drawn_length, request.longest)
    except LoopError as error:
        raise ForwardRefusedError(explain_loop(error)) from error
    if rebuilt is None:
        return None
    graph = request.capture(rebuilt)
    if rebuilt.max_length is not None:
        limit_lengths(graph, rebuilt.max_length)  # the checks need not look beyond the proven length
    return graph


def _refuse_foreign_tensors(source: Source, tried: Tried) -> None:
    """Raise ForwardRefusedError for a tensor of a class with operations of its own, which would crash a recording.

    Another tensor that no file has replaces the error of torch.export.
    """
    foreign = find_foreign_tensor(source)
    cause = None if tried.failure is None else tried.failure.__cause__
    if foreign is not None and foreign.is_class:
        raise ForwardRefusedError(str(foreign)) from cause
    if foreign is not None and isinstance(tried.failure, TraceFailedError):
        tried.failure = UnsupportedModelError(str(foreign))
        tried.failure.__cause__ = cause


def _accepts_example(graph: CapturedGraph, request: TraceRequest, tried: Tried) -> bool:
    _check(graph, request)
    if tried.failure is not None:
        refuse_same_path(graph, request.source, tried.failure)
    return True


def explain_loop(error: LoopError) -> str:
    """Return two sentences about a loop over positions that cannot be written as one operation."""
    line = line_of_trace(error.stack_trace)
    return (
        f"the loop over positions{line and f' at {line}'} cannot be exported: {error}. Each run has to do the same "
        "operations on the rows of its position, on values that all positions share, and on values of the run before, "
        "which keep their shape"
    )


WAYS = (
    Way("torch.export", _export, _accepts_export),
    Way("by example", _example, _accepts_example),
    Way("by example, row by row", _example_of_rows, _accepts_example),
)
BY_EXAMPLE = WAYS[1:]
