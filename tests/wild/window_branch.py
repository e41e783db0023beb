"""Branches on the length whose two ways agree where both are possible, such as a window that is wider than the row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import TinyDecoder

WINDOW = 9


class WindowOrAll(TinyDecoder):
    """A mask is made only for rows that are longer than the window."""

    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        time = idx.shape[1]
        if time <= WINDOW:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            distance = torch.arange(time)[:, None] - torch.arange(time)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))
        return self.attention.out(mixed.transpose(1, 2).flatten(2))


class TwoWindows(TinyDecoder):
    """Three ways, by two lengths."""

    def mix(self, x, idx):
        time = idx.shape[1]
        hidden = torch.ones(time, time).triu(1).bool()
        total = 0
        for window in (WINDOW, 2 * WINDOW):
            if time > window:
                hidden = hidden | torch.ones(time, time).tril(-window).bool()
            total = total + self.attention(x, hidden)
        return total


class OtherBelow(TinyDecoder):
    """Short rows are scaled otherwise, so that no way holds for all lengths."""

    def mix(self, x, idx):
        if idx.shape[1] <= WINDOW:
            x = 2 * x
        return self.attention(x, self.mask(idx))


CASES = [
    Case("window-or-all", WindowOrAll),
    Case("two-windows", TwoWindows, thorough=True),
]
