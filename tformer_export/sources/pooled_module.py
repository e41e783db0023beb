"""A vector for each row of an encoder that gives one for each position: pooled over the positions that are the row's
own. The same definitions as sentence-transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

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
