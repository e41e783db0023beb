"""Pooling over the valid positions of each row of an encoder, by the definitions of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pipeline = Callable[[Any, int | None], torch.Tensor]  # Source.own_pipeline


def _first(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return states[:, 0]


def _last(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    last = keep.sum(1, keepdim=True).long() - 1  # (batch, 1, 1)
    return states.gather(1, last.expand(-1, -1, states.shape[2])).squeeze(1)


def _max(states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
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
    "max": _max,
    "last": _last,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _mean_by_position,
}


class PooledModule(nn.Module):
    """A module that pools the states (batch, time, width) of another module to one vector for each row.

    mask: the index of the input that marks the valid positions, (batch, time); None if all positions are valid.
    passes_mask: whether `module` takes that input as well.
    keep: the value of the mask at valid positions.
    pools: names in `POOLS`; their vectors are concatenated.
    then: a module that is applied to the vector; None for none.
    normalize: whether vectors are scaled to length 1.
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
        self.mask, self.passes_mask, self.keep, self.pools, self.normalize = mask, taken, keep, tuple(pools), normalize

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.mask is None or inputs[self.mask] is None:  # left to the default of `module`: nothing is padded
            return self.vector(states := self.module(*inputs), states.new_ones((*states.shape[:2], 1)))
        mask = inputs[self.mask]
        states = self.module(*(inputs if self.passes_mask else inputs[: self.mask] + inputs[self.mask + 1 :]))
        return self.vector(states, (mask if self.keep else mask == 0).to(states.dtype)[:, :, None])

    def vector(self, states: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Pool states (batch, time, width) to (batch, width). keep: (batch, time, 1), 1 or 0."""
        parts = [POOLS[name](states, keep) for name in self.pools]
        vector = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        vector = vector if self.then is None else self.then(vector)
        return F.normalize(vector, dim=1) if self.normalize else vector
