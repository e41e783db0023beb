"""A vector for each row of an encoder that gives one for each position: pooled over the positions that are the row's
own, and what may follow that. The same definitions as sentence-transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from tformer_export.common.derived_inputs import padding
from tformer_runtime.base.errors import OptionError, SourceError

if TYPE_CHECKING:
    from tformer_export.sources.base import Source

Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Answer = Callable[[Any, int | None], torch.Tensor]  # of `Source`


def _first(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return states[:, 0]


def _last(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    last = keep.sum(1, keepdim=True).long() - 1  # (batch, 1, 1)
    return states.gather(1, last.expand(-1, -1, states.shape[2])).squeeze(1)


def _largest(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(keep == 0, torch.finfo(states.dtype).min).amax(1)


def _mean(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (states * keep).sum(1) / keep.sum(1).clamp(min=1e-9)


def _mean_by_root(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (states * keep).sum(1) / keep.sum(1).clamp(min=1e-9).sqrt()


def _mean_by_position(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    weights = keep * torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


POOLS: dict[str, Pool] = {  # states (batch, time, width) and keep (batch, time, 1), 1 or 0 → (batch, width)
    "mean": _mean,
    "first": _first,
    "max": _largest,
    "last": _last,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _mean_by_position,
}
CHOICES = ("mean", "first", "max", "last")  # of --pool


class Pooled(nn.Module):
    """`module` gives (batch, time, width); this, a vector for each row.

    mask: which of forward's inputs tells a row's own positions, (batch, time); None: all are. taken: whether `module`
    takes it too. keep: what it holds there. pools: one after the other, of `POOLS`. then: what follows them. normalize:
    to length 1.
    """

    def __init__(
        self,
        module: nn.Module,
        mask: int | None,
        taken: bool,
        keep: bool,
        pools: Sequence[str],
        then: nn.Module | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.then = module, then
        self.mask, self.taken, self.keep, self.pools, self.normalize = mask, taken, keep, tuple(pools), normalize

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            return self.vector(states := self.module(*inputs), states.new_ones((*states.shape[:2], 1)))
        mask = inputs[self.mask]
        states = self.module(*(inputs if self.taken else inputs[: self.mask] + inputs[self.mask + 1 :]))
        return self.vector(states, (mask if self.keep else mask == 0).to(states.dtype)[:, :, None])

    def vector(self, states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """(batch, width) of states (batch, time, width); keep: (batch, time, 1), 1 or 0."""
        parts = [POOLS[name](states, keep) for name in self.pools]
        vector = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        vector = vector if self.then is None else self.then(vector)
        return F.normalize(vector, dim=1) if self.normalize else vector


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
