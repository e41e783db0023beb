"""Modules with several low-rank adapters, of which each row of a batch has one or none.

The factors of all adapters stand next to each other: `down` maps the input to all their ranks together, and `up` maps
these to the output. Between the two, each row is multiplied by a row of a small table, which holds the scale of its own
adapter at the ranks of that adapter and 0 elsewhere. So no row needs a copy of its factors, ranks may differ, and a row
without an adapter adds exactly 0. The cost of a product grows with the sum of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tformer_runtime.format.manifest import ADAPTER_INPUT

FACTORS = ("low_rank_down", "low_rank_up")  # the names of the factors of a module


@dataclass
class AdapterSwitch:
    """The number of each row's adapter, (batch,) int64, while a model runs; None: no row has one. 0 stands for none."""

    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class LowRank:
    """One adapter of one module: x → scale · up(down(x)). down: (rank, inner). up: (outer, rank)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class _Switched(nn.Module):
    """A module whose result gets the low-rank part of each row's adapter.

    The factors have three axes: a product with a matrix of two axes is one that quantisation would store in integers.
    `passes/unstack_products.py` leaves those of these names, `FACTORS`, so.
    """

    def __init__(self, base: nn.Module, switch: AdapterSwitch, adapters: Sequence[LowRank | None]) -> None:
        """adapters: of each adapter of the model, its part of this module; None if it has none here."""
        super().__init__()
        self.base, self.switch = base, switch
        present = [adapter for adapter in adapters if adapter is not None]
        scales = torch.zeros(1 + len(adapters), sum(len(adapter.down) for adapter in present))
        first = 0
        for row, adapter in enumerate(adapters, 1):
            if adapter is not None:
                scales[row, first : first + len(adapter.down)] = adapter.scale
                first += len(adapter.down)
        self.register_buffer("scales", scales)
        down = torch.cat([adapter.down.detach().float() for adapter in present]).T[None].contiguous()
        up = torch.cat([adapter.up.detach().float() for adapter in present], 1).T[None].contiguous()
        self.low_rank_down, self.low_rank_up = nn.Parameter(down, False), nn.Parameter(up, False)

    def forward(self, values: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = self.base(values, *arguments, **options)
        rows = self.switch.rows
        if rows is None:
            return result
        low = self.to_ranks(values)
        shape, batch = low.shape, rows.shape[0]
        scales = self.scales.index_select(0, rows)
        if low.dim() == 2 and shape[0] == batch:
            added = torch.matmul((low * scales)[:, None], self.low_rank_up)[:, 0]
        elif shape[0] == batch:
            for _ in range(low.dim() - 2):
                scales = scales[:, None]
            added = torch.matmul(low * scales, self.low_rank_up)
        else:  # rows and positions in one axis
            low = low.reshape(batch, -1, shape[-1]) * scales[:, None]
            added = torch.matmul(low, self.low_rank_up).reshape(*shape[:-1], self.low_rank_up.shape[-1])
        return result + added

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the adapted module, such as the weight whose type a model asks for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def to_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return `down` of the input: (batch, …, ranks)."""
        raise NotImplementedError


class SwitchedProduct(_Switched):
    """A linear layer, of any layout of its own weight. Its input is (batch, …, inner)."""

    def to_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 2:
            return torch.matmul(values[:, None], self.low_rank_down)[:, 0]
        return torch.matmul(values, self.low_rank_down)


class SwitchedEmbedding(_Switched):
    """An embedding. Its input is ids, (batch, …)."""

    def __init__(self, base: nn.Module, switch: AdapterSwitch, adapters: Sequence[LowRank | None]) -> None:
        super().__init__(base, switch, adapters)
        self.low_rank_down = nn.Parameter(self.low_rank_down[0][:, None].contiguous(), False)  # (ids, 1, ranks)

    def to_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.low_rank_down[values][..., 0, :]


class WithAdapters(nn.Module):
    """A module with one input more, the last: the number of each row's adapter, (batch,) int64.

    names: of the adapters from 1 on.
    """

    def __init__(self, module: nn.Module, switch: AdapterSwitch, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.switch, self.names = module, switch, tuple(names)

    def forward(self, *inputs: torch.Tensor) -> Any:
        *others, rows = inputs
        self.switch.rows = rows
        try:
            return self.module(*others)
        finally:
            self.switch.rows = None


def adapter_example(count: int) -> dict[str, torch.Tensor]:
    """Return the example of the input for the numbers of `count` adapters."""
    return {ADAPTER_INPUT: torch.arange(2) % (count + 1)}
