"""A tiny decoder in the style of published code. A case overrides the part that it is about."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
from support.handwritten_case import BLOCK, VOCABULARY

WIDTH, HEADS = 24, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        """Return queries, keys and values (batch, time, heads, d)."""
        return [part.view(*x.shape[:2], HEADS, WIDTH // HEADS) for part in self.qkv(x).split(WIDTH, -1)]

    def attend(self, q, k, v, mask):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, mask):
        return self.attend(*self.heads(x), mask)


class TinyDecoder(nn.Module):
    """logits = head(norm(h + feed_forward(h))), h = x + attention(norm(x)), x = embedding + position."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.attention = Attention()
        self.norm, self.final_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def mask(self, idx):
        """Return a mask (time, time), true where a key is hidden."""
        return torch.ones(idx.shape[1], idx.shape[1]).triu(1).bool()

    def mix(self, x, idx):
        return self.attention(x, self.mask(idx))

    def feed_forward(self, x):
        return self.narrow(torch.nn.functional.gelu(self.widen(x)))

    def forward(self, idx):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        x = x + self.mix(self.norm(x), idx)
        x = x + self.feed_forward(self.norm(x))
        return self.head(self.final_norm(x))
