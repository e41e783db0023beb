"""A `model.pt` written by `tformer_export.checkpoint.save_checkpoint`."""

from __future__ import annotations

import inspect
import os

import torch

from tformer_export.checkpoint import EVERY_INPUT, load_checkpoint
from tformer_export.source.base import Source, special_tokens
from tformer_export.source.module import from_module
from tformer_runtime.errors import SourceError


def from_checkpoint(path: str | os.PathLike[str], step: str | None = None) -> Source:
    """forward's required parameters are taken as token ids, (batch, time) each."""
    checkpoint = load_checkpoint(path)
    module = checkpoint.build()
    names = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    step = step or checkpoint.step
    if step is not None and step not in names:
        raise SourceError(f"{path}: forward has no parameter {step!r} to step over: it takes {', '.join(names)}")
    tokens = special_tokens(checkpoint.special)
    every = checkpoint.tokenizers.get(EVERY_INPUT)
    tokenizers = dict.fromkeys(names, every) if every is not None else checkpoint.tokenizers
    source = from_module(
        module,
        {name: torch.arange(1, 7).reshape(2, 3) % 3 for name in names},
        step,
        task=checkpoint.task,
        special=tokens,
        tokenizers=tokenizers,
        defaults=checkpoint.defaults,
        max_length=checkpoint.max_length,
    )
    source.name = os.path.basename(path)
    return source
