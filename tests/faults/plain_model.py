"""A language model without attention, which is quick to export."""

from __future__ import annotations

import torch
from torch import nn


class Plain(nn.Module):
    """logits = out(embedding + place)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.out = nn.Embedding(12, 8), nn.Embedding(20, 8), nn.Linear(8, 12)

    def forward(self, tgt: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tgt) + self.places(torch.arange(tgt.shape[1])))


def plain() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Plain(), {"tgt": torch.tensor([[3, 4, 5], [6, 7, 8]])}
