"""`capture_model`: the traced graph of a source, which gives equal results for equal inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.option_values import DEFAULT_MAX_LENGTH
from tformer_export.soundness.determinism import (
    check_devices,
    refuse_half,
    refuse_kept_state,
    refuse_random,
    refuse_scaled_weights,
    rehearse,
)
from tformer_export.soundness.size_branches import (
    find_needed_lengths,
    limit_by_counted_positions,
    refuse_short_limits,
)
from tformer_export.sources import Source
from tformer_export.sources.call.independent_lengths import separate_lengths
from tformer_export.trace.lengths import trace_source
from tformer_runtime.base.errors import UnsupportedModelError


@dataclass(frozen=True)
class CapturedModel:
    """A source with its traced graph, which gives equal results for equal inputs."""

    source: Source
    graph: CapturedGraph


def capture_model(source: Source, hidden_states: Sequence[str] = (), max_length: int | None = None) -> CapturedModel:
    """Trace a source, with the outputs of the submodules `hidden_states`.

    max_length: the longest sequence; None for the default.

    Raises UnsupportedModelError for a model that cannot be traced, or whose results are not the same for the same
    inputs.
    """
    check_devices(source)
    source = separate_lengths(source)
    try:
        graph = trace_source(source, hidden_states, max_length)
    except UnsupportedModelError as error:
        rehearse(source)  # if forward fails by itself, report that error instead
        if error.__cause__ is not None:  # an error of torch.export does not say that forward keeps state
            refuse_kept_state(source)
        raise
    refuse_scaled_weights(source)
    refuse_half(graph)
    refuse_random(graph, rehearse(source))
    limit_by_counted_positions(graph, source, max_length or source.max_length or DEFAULT_MAX_LENGTH)
    refuse_short_limits(graph, source)
    find_needed_lengths(graph, source)
    return CapturedModel(source, graph)
