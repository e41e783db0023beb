"""Refusals of models that cannot be decoded step by step: their step input, their output and their special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.capture.trace import CapturedGraph, vocabulary_size
from tformer_export.common.fx_nodes import expression, meta, source_line
from tformer_export.common.module_state import attempt, unchanged
from tformer_export.common.source_lines import size_words
from tformer_export.sources import Source
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.outputs import all_outputs
from tformer_runtime.base.errors import OptionError, UnsupportedModelError

PROBABILITY_SUM_ERROR = 1e-3  # by which a sum of probabilities may differ from 1


def check_stated_ids(source: Source, outputs: Sequence[torch.Tensor]) -> None:
    """Raise OptionError for special ids that could be neither predicted nor fed, before the model is traced.

    outputs: of forward on the example, the logits first. An id beyond the logits may be one of a larger table of the
    inputs, so forward is run with it: for such ids alone.
    """
    step = source.step_input
    if step is None or not outputs or outputs[0].dim() < 2 or source.example[step].is_floating_point():
        return
    width = outputs[0].shape[-1]
    for name, ids in _stated_ids(source):
        for i in ids:
            if i >= width and not _takes_id(source, i):
                raise _outside(name, i, width)
    forced = source.generation_defaults.get("forced_bos_token_id")
    if isinstance(forced, int) and forced >= width:
        raise _outside("forced_bos_token_id", forced, width)


def check_special_tokens(source: Source, inputs: Mapping[str, InputFacts]) -> None:
    """Raise OptionError for special ids outside the vocabulary, and for a padding that an input cannot look up.

    Rows of a step input alone are padded with any id of its own.
    """
    ids = inputs[source.step_input].vocabulary if source.step_input is not None else None
    for name, special_ids in _stated_ids(source):
        for i in special_ids:
            if ids is not None and not 0 <= i < ids:
                raise _outside(name, i, ids)
    for name, facts in inputs.items():
        if name != source.step_input and facts.vocabulary is not None and facts.pad >= facts.vocabulary:
            raise OptionError(
                f"the special id pad_token_id={facts.pad} is not in the vocabulary of {name}, which has "
                f"{facts.vocabulary} ids: name the id with which its rows are padded (special_tokens, --pad-id)"
            )


def check_max_length(source: Source, inputs: Mapping[str, InputFacts], max_length: int | None) -> None:
    """Raise OptionError for a greatest length that no input of a single-pass model can have.

    The tables of a model that is stepped over are checked when they are made.
    """
    if source.step_input is not None or max_length is None:
        return
    limits = {name: facts.table_length for name, facts in inputs.items() if facts.table_length is not None}
    if limits and max_length > max(limits.values()):
        name = max(limits, key=lambda each: limits[each])
        raise OptionError(
            f"the model cannot run at a length of {max_length}: its input {name} has at most {limits[name]} positions; "
            "give a lower max_length, or leave it out"
        )


def _stated_ids(source: Source) -> list[tuple[str, tuple[int, ...]]]:
    special = source.special_tokens
    return [("bos_token_id", special.bos_token_ids), ("eos_token_id", special.eos_token_ids)]


def _outside(name: str, i: int, ids: int) -> OptionError:
    return OptionError(f"the special id {name}={i} is not in the model's vocabulary, which has {ids} ids")


def _takes_id(source: Source, i: int) -> bool:
    """Return whether forward runs if the step input holds an id."""
    assert source.step_input is not None
    inputs = {**source.example, source.step_input: torch.full_like(source.example[source.step_input], i)}
    return attempt(source.module, inputs).runs


def check_step_input(captured: CapturedGraph, inputs: Mapping[str, InputFacts]) -> None:
    """Raise UnsupportedModelError unless the step input holds token ids, or numbers (batch, time, features).

    Decoding appends a token to it, or a step of a series.
    """
    assert captured.step_name is not None
    value = captured.example[captured.step_name]
    if value.is_floating_point() and value.dim() != 3:
        raise UnsupportedModelError(
            f"the step input {captured.step_name!r} holds numbers in {value.dim()} axes: let forward take (batch, "
            "time, features), with one feature where there is one, or export it without a step input (step_input=None)"
        )
    if not value.is_floating_point() and value.dim() > 2:
        raise UnsupportedModelError(
            f"the step input {captured.step_name!r} holds {value.shape[2]} ids for each position, and decoding appends "
            "one: let forward take (batch, time), and compute the other ids, such as positions, itself"
        )
    if inputs[captured.step_name].ids is None and not value.is_floating_point():
        raise UnsupportedModelError(
            f"the step input {captured.step_name!r} holds {value.dtype}, neither token ids nor numbers: let forward "
            "take the ids (int64) and look them up itself, or export it without a step input (step_input=None)"
        )


def check_output(captured: CapturedGraph, source: Source) -> None:
    """Raise UnsupportedModelError unless the output has logits or numbers for every position of the step input.

    Its shape is (batch, time, vocabulary), or with the first two axes exchanged.
    """
    shape = meta(captured.output).shape
    first = [expression(size) for size in shape[:2]]
    has_positions = len(shape) == 3 and isinstance(shape[2], int)
    has_positions = has_positions and any(size == captured.time for size in first)
    has_positions = has_positions and any(size in captured.batch for size in first)
    assert captured.step_name is not None
    ids = vocabulary_size(captured, captured.step_name)
    if has_positions and ids in (None, shape[2]):
        return
    other = _wide_output(captured, source, ids) if ids else None
    if has_positions and other is None:
        return
    of_ids = not captured.example[captured.step_name].is_floating_point()
    expected = "(batch, time, vocabulary)" if of_ids else "(batch, time, features)"
    sizes = ", ".join(size_words(expression(size), captured.size_names) for size in shape)
    if not any(captured.time in expression(size).free_symbols for size in shape):
        difference = "which has no row for each position of it: it is pooled, or one position is taken out"
    else:
        difference = f"which is not {expected}"
    if other is not None:
        raise UnsupportedModelError(
            f"forward returns ({sizes}) first, at {source_line(captured.output)}, which is not as wide as the "
            f"vocabulary of {captured.step_name!r}, {ids}, and its output {other!r} is: name the logits, "
            f"output={other!r}"
        )
    raise UnsupportedModelError(
        f"forward returns ({sizes}) first, at {source_line(captured.output)}, {difference}. To be stepped over "
        f"{captured.step_name!r} it must return {'logits' if of_ids else 'numbers'} for every position, {expected}; a "
        "model that gives one answer for its input is exported without a step input (step_input=None)"
    )


def check_logits(captured: CapturedGraph, values: Mapping[Node, Any]) -> None:
    """Raise UnsupportedModelError if the output holds probabilities.

    They would be scored, sampled and searched as if they were logits.
    """
    output = values[captured.output]
    if bool((output >= 0).all()) and bool(((output.sum(-1) - 1).abs() < PROBABILITY_SUM_ERROR).all()):
        raise UnsupportedModelError(
            f"forward returns probabilities, at {source_line(captured.output)}: they are not negative and sum to 1 at "
            "every position. Return the logits, or the log-probabilities (log_softmax), from which they follow"
        )
    if bool(((output >= 0) & (output <= 1)).all()):
        raise UnsupportedModelError(
            f"forward returns numbers from 0 to 1 alone, at {source_line(captured.output)}, as a sigmoid gives: return "
            "the logits before it"
        )


def _wide_output(captured: CapturedGraph, source: Source, ids: int) -> str | int | None:
    """Find another output that has a row for each position and is as wide as the vocabulary.

    Return its name or index; None if there is none, or if the user chose an output.
    """
    module = source.module
    if not isinstance(module, Adapter) or module.output is not None or module.heads:
        return None
    assert captured.step_name is not None
    with torch.no_grad(), unchanged(module):
        outputs = all_outputs(module.call_module(*captured.example.values()))
    rows = sorted(captured.example[captured.step_name].shape[:2])
    wide = [name for name, v in outputs.items() if v.dim() == 3 and v.shape[2] == ids and sorted(v.shape[:2]) == rows]
    return wide[0] if wide else None
