"""Dropout that draws its mask from random bytes: on a CPU, `nn.Dropout` spends a third of a training step on that."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """y = x · keep / P(keep); each keep is drawn with one random byte, so p is rounded to a multiple of 1/256."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropped = round(p * 256)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropped == 0:
            return x
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        keep = (words.view(torch.uint8)[: x.numel()] >= self.dropped).view(x.shape)
        return x * keep * (256 / (256 - self.dropped))


def use_byte_dropout(module: nn.Module) -> None:
    """Put ByteDropout in the place of every `nn.Dropout` inside `module`; weights and their names stay as they are."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, ByteDropout(child.p))
