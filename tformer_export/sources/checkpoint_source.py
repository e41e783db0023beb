"""A `model.pt` written by `tformer_export.common.checkpoint.save_checkpoint`."""

from __future__ import annotations

import os

from tformer_export.common.checkpoint import EVERY_INPUT, load_checkpoint
from tformer_export.sources.base import Source, special_tokens
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.torch_module import from_module, has_one_length, ids_for, numbers_for
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import Outcome


def from_checkpoint(path: str | os.PathLike[str], step: str | None = None) -> Source:
    """forward's required parameters are taken as token ids, (batch, time) each; of a model that forecasts, as numbers,
    (batch, time, features)."""
    checkpoint = load_checkpoint(path)
    module = checkpoint.build()
    example = ids_for(module) if checkpoint.series is None else numbers_for(module, checkpoint.series, checkpoint.step)
    step = step or checkpoint.step
    if step is not None and step not in example:
        raise SourceError(f"{path}: forward has no parameter {step!r} to step over: it takes {', '.join(example)}")
    every = checkpoint.tokenizers.get(EVERY_INPUT)
    source = from_module(
        module,
        example,
        step,
        task=checkpoint.task,
        special=special_tokens(checkpoint.special),
        tokenizers=dict.fromkeys(example, every) if every is not None else checkpoint.tokenizers,
        defaults=checkpoint.defaults,
        max_length=checkpoint.max_length,
        series=checkpoint.series,
        dynamic=dict.fromkeys(example, (0,)) if step is None and has_one_length(checkpoint.series or {}) else None,
    )
    source.name = os.path.basename(path)
    source.outcome = Outcome(tuple(checkpoint.labels))
    return source if checkpoint.chat_template is None else with_template(source, checkpoint.chat_template)
