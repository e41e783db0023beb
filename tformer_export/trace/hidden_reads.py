"""Data that Python reads, where a trace takes the path of its example."""

from __future__ import annotations

from dataclasses import replace

from tformer_export.capture.by_example.input_facts import with_facts
from tformer_export.capture.by_example.proof import FORWARD_FAILURES, asked_ids
from tformer_export.capture.by_example.reads import NoteReads
from tformer_export.capture.by_example.recording import record
from tformer_export.capture.by_example.recording_inputs import DataKind, RecordingInputs
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.example_sizes import size_groups
from tformer_export.common.module_state import restored
from tformer_export.soundness.size_branches import gives
from tformer_export.sources import Source
from tformer_runtime.base.errors import UnsupportedModelError


def refuse_hidden_reads(graph: CapturedGraph, source: Source) -> None:
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
    draws = with_facts(input_draws(source), recording)
    sizes = [graph.example[group[0][0]].shape[group[0][1]] for group in draws.groups]
    for number in sorted({*asked_ids([recording], draws), *draws.paddings}):
        of_number = replace(draws, asked=number)
        if not all(gives(graph, source, of_number.draw(sizes, DataKind(False), seed)) for seed in (0, 1)):
            raise UnsupportedModelError(
                f"forward computes something else while it is traced, or it lets data decide, at {reads.places[0]}. A "
                "file has one execution path for all inputs: choose with torch.where or a mask, or remove the check"
            )


def input_draws(source: Source) -> RecordingInputs:
    """Return how inputs are drawn at which forward runs by example."""
    axes = {name: source.axes.get(name, (0, 1)[: value.dim()]) for name, value in source.example.items()}
    padding = source.special_tokens.pad_token_id
    return RecordingInputs(
        source.example,
        size_groups(source.example, axes, source.step_input),
        source.step_input,
        source.masks,
        frozenset() if padding is None else frozenset({padding}),
    )
