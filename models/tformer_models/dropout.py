"""Dropout with a mask of random bytes, which is faster on a CPU than the Bernoulli sampling of `nn.Dropout`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BYTE_VALUES = 256
BYTES_PER_WORD = 8  # of int64, the widest integer that torch draws


class ByteDropout(nn.Module):
    """Inverted dropout, y = x · keep / P(keep), with one random byte per element.

    p: probability to drop an element, rounded to a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop_threshold = round(p * BYTE_VALUES)  # an element is dropped if its byte is below this

    def forward(self, x: Tensor) -> Tensor:
        """Return x with dropped elements in training mode, x itself in eval mode."""
        if not self.training or self.drop_threshold == 0:
            return x
        word_count = (x.numel() + BYTES_PER_WORD - 1) // BYTES_PER_WORD
        words = torch.empty(word_count, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        keep = (words.view(torch.uint8)[: x.numel()] >= self.drop_threshold).view(x.shape)
        return x * keep * (BYTE_VALUES / (BYTE_VALUES - self.drop_threshold))


def use_byte_dropout(module: nn.Module) -> None:
    """Replace every `nn.Dropout` inside `module` with a ByteDropout; weights and their names do not change."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, ByteDropout(child.p))
