"""Pooling of a source's output to one vector for each row, with optional layers after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import padding
from tformer_export.common.option_values import POOLINGS
from tformer_export.sources.base import Source
from tformer_export.sources.forward_errors import run_example
from tformer_export.sources.pooled_module import POOLS, Pipeline, PooledModule
from tformer_runtime.base.errors import OptionError, SourceError


def with_pooling(
    source: Source, pools: Sequence[str], then: nn.Module | None = None, normalize: bool = False
) -> Source:
    """Add pooling over the valid positions of a text, or over all positions of an image.

    pools: names in `POOLS`; their vectors are concatenated.
    then: a module that is applied to the vector.
    normalize: scale vectors to length 1.

    Raises OptionError for an unknown pooling, SourceError for an output without a vector for each position.
    """
    unknown = [name for name in pools if name not in POOLS]
    if unknown:
        raise OptionError(f"pooling must be one of {', '.join(POOLINGS)}, not {unknown[0]!r}")
    if source.step_input is not None:
        raise SourceError(
            f"pooling is for single-pass models, but this one has the step input {source.step_input!r}: leave out one "
            "of them (--task feature-extraction loads a Hugging Face folder without its language model head)"
        )
    if source.outputs:
        raise SourceError(f"pooling takes one output, but the model returns {', '.join(source.outputs)}: name one")
    of = next(iter(source.caller_inputs), "")
    shape = tuple(run_example(source)[0].shape)
    example_ids = source.example[of]
    whole = example_ids.is_floating_point() and example_ids.dim() == 4  # an image: all positions are valid
    if len(shape) != 3 or not (whole or shape[:2] == example_ids.shape[:2]):
        raise SourceError(
            f"pooling needs a vector for each position, (batch, time, width), but the model returns {shape} for an "
            "input "
            f"of {tuple(example_ids.shape)}: leave out --pooling (Task(pooling=…)), or let forward return its last "
            "states"
        )
    answer = None if source.own_pipeline is None else _pooled_pipeline(source.own_pipeline, pools, then, normalize)
    if whole:
        module = PooledModule(source.module, None, True, True, pools, then, normalize)
        return replace(source, module=module, own_pipeline=answer)
    mask_name = next((name for name, mask in source.masks.items() if mask.of == of), None)
    example, masks = dict(source.example), dict(source.masks)
    name = mask_name or f"{of}.keep"
    if mask_name is None:
        masks[name] = padding(of)
        example[name] = torch.ones(example_ids.shape[:2], dtype=torch.bool)
    place = list(example).index(name)
    module = PooledModule(source.module, place, mask_name is not None, bool(masks[name].keep), pools, then, normalize)
    return replace(source, module=module, example=example, masks=masks, own_pipeline=answer)


def _pooled_pipeline(answer: Pipeline, pools: Sequence[str], then: nn.Module | None, normalize: bool) -> Pipeline:
    """Add pooling to the source's own pipeline. It handles one row without padding, so it needs no mask."""
    plain: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda states: states.mean(0),
        "first": lambda states: states[0],
        "max": lambda states: states.max(0).values,
        "last": lambda states: states[-1],
        "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda states: torch.arange(1.0, len(states) + 1) @ states / sum(range(len(states) + 1)),
    }

    def pipeline(sample: Any, max_tokens: int | None) -> torch.Tensor:
        states = answer(sample, max_tokens)
        with torch.no_grad():
            vector = torch.cat([plain[name](states) for name in pools])
            vector = vector if then is None else then(vector)
        return vector / vector.norm() if normalize else vector

    return pipeline
