"""A source with pooling behind it: a vector for each row, and what may follow that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import padding
from tformer_export.sources.base import Source
from tformer_export.sources.pooled_module import CHOICES, POOLS, Answer, Pooled
from tformer_runtime.base.errors import OptionError, SourceError


def pooled(source: Source, pools: Sequence[str], then: nn.Module | None = None, normalize: bool = False) -> Source:
    """The source with pooling over the positions of its ids, or over all that it gives for an image. OptionError for a
    pool that there is not; SourceError for a source whose output has no vector for each position."""
    unknown = [name for name in pools if name not in POOLS]
    if unknown:
        raise OptionError(f"pool is one of {', '.join(CHOICES)}, not {unknown[0]!r}")
    if source.step is not None:
        raise SourceError(
            f"pooling is for models that are run once, and this one is stepped over {source.step!r}: leave out either "
            "(--task feature-extraction loads a Hugging Face folder without what it generates with)"
        )
    if source.outputs:
        raise SourceError(f"pooling is of one output, and the model gives {', '.join(source.outputs)}: name one")
    of = next(iter(source.given), "")
    with source.ready(), torch.no_grad():
        shape = tuple(source.module(*source.example.values()).shape)
    held = source.example[of]
    whole = held.is_floating_point() and held.dim() == 4  # an image: all positions are its own
    if len(shape) != 3 or not (whole or shape[:2] == held.shape[:2]):
        raise SourceError(
            f"pooling needs a vector for each position, (batch, time, width), and the model gives {shape} for an input "
            f"of {tuple(held.shape)}: leave out --pool (pool=), or let forward return its last states"
        )
    answer = None if source.answer is None else _of_whole(source.answer, pools, then, normalize)
    if whole:
        module = Pooled(source.module, None, True, True, pools, then, normalize)
        return replace(source, module=module, answer=answer)
    found = next((name for name, mask in source.masks.items() if mask.of == of), None)
    example, masks = dict(source.example), dict(source.masks)
    name = found or f"{of}.keep"
    if found is None:
        masks[name] = padding(of)
        example[name] = torch.ones(held.shape[:2], dtype=torch.bool)
    place = list(example).index(name)
    module = Pooled(source.module, place, found is not None, bool(masks[name].keep), pools, then, normalize)
    return replace(source, module=module, example=example, masks=masks, answer=answer)


def _of_whole(answer: Answer, pools: Sequence[str], then: nn.Module | None, normalize: bool) -> Answer:
    """The source's own answer, pooled, as far as it is one row without padding: no mask is needed, and none is used."""
    plain: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda states: states.mean(0),
        "first": lambda states: states[0],
        "max": lambda states: states.max(0).values,
        "last": lambda states: states[-1],
        "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda states: torch.arange(1.0, len(states) + 1) @ states / sum(range(len(states) + 1)),
    }

    def whole(sample: Any, most: int | None) -> torch.Tensor:
        states = answer(sample, most)
        with torch.no_grad():
            vector = torch.cat([plain[name](states) for name in pools])
            vector = vector if then is None else then(vector)
        return vector / vector.norm() if normalize else vector

    return whole
