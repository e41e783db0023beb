"""A `model.pt` written by `tformer_export.common.checkpoint.save_checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from tformer_export.common.checkpoint import EVERY_INPUT, load_checkpoint
from tformer_export.sources.base import Source, parse_special_tokens
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.factory import see_current_folder
from tformer_export.sources.torch_module import example_ids, example_numbers, from_module, has_fixed_length
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import OutputMeaning


def from_checkpoint(
    path: str | os.PathLike[str],
    step_input: str | None = None,
    head: Sequence[str] | None = None,
    trust: Sequence[str] = (),
) -> Source:
    """Load a checkpoint. trust: packages or modules of which it may name any factory.

    The required parameters of forward are token ids, (batch, time), or numbers (batch, time, features) of a forecaster.
    Raises SourceError for a step input that forward does not have.
    """
    checkpoint = load_checkpoint(path)
    if trust:
        see_current_folder()
    module = checkpoint.build(trust)
    example = (
        example_ids(module)
        if checkpoint.series is None
        else example_numbers(module, checkpoint.series, checkpoint.step_input)
    )
    step_input = step_input or checkpoint.step_input
    if step_input is not None and step_input not in example:
        raise SourceError(
            f"{path}: forward has no parameter {step_input!r} to step over: it takes {', '.join(example)}"
        )
    for_all_inputs = checkpoint.tokenizers.get(EVERY_INPUT)
    source = from_module(
        module,
        example,
        step_input,
        task=checkpoint.task,
        special_tokens=parse_special_tokens(checkpoint.special_tokens),
        max_length=checkpoint.max_length,
        series=checkpoint.series,
        head=head,
        axes=dict.fromkeys(example, (0,)) if step_input is None and has_fixed_length(checkpoint.series or {}) else None,
    )
    source = replace(
        source,
        name=os.path.basename(path),
        tokenizers=dict.fromkeys(example, for_all_inputs) if for_all_inputs is not None else checkpoint.tokenizers,
        generation_defaults=checkpoint.generation_defaults,
        output_meaning=OutputMeaning(tuple(checkpoint.labels)),
    )
    return source if checkpoint.chat_template is None else with_template(source, checkpoint.chat_template)
