"""Models with caches of their own, which forward writes in place from start_pos = 0."""

from __future__ import annotations

import torch
from support.handwritten_case import BLOCK, Case
from tiny import HEADS, WIDTH, TinyDecoder

MAX_ROWS = 4


class WithStartPosition(TinyDecoder):
    """Llama's own code: caches as attributes, and a mask over old and new keys."""

    def __init__(self):
        super().__init__()
        self.cache_k = torch.zeros(MAX_ROWS, BLOCK, HEADS, WIDTH // HEADS)
        self.cache_v = torch.zeros(MAX_ROWS, BLOCK, HEADS, WIDTH // HEADS)

    def mix(self, x, idx, start_pos=0):
        rows, time = x.shape[:2]
        q, k, v = self.attention.heads(x)
        self.cache_k[:rows, start_pos : start_pos + time] = k
        self.cache_v[:rows, start_pos : start_pos + time] = v
        k, v = self.cache_k[:rows, : start_pos + time], self.cache_v[:rows, : start_pos + time]
        mask = None
        if time > 1:
            mask = torch.full((time, time), float("-inf")).triu(1)
            mask = torch.hstack([torch.zeros((time, start_pos)), mask]) < 0
        return self.attention.attend(q, k, v, mask)


class AsBuffers(WithStartPosition):
    def __init__(self):
        super().__init__()
        for name in ("cache_k", "cache_v"):
            cache = getattr(self, name)
            delattr(self, name)
            self.register_buffer(name, cache, persistent=False)


class ByPositions(WithStartPosition):
    """Rows are written at positions that a tensor names."""

    def write(self, cache, rows, positions, new):
        cache[:rows, positions] = new

    def mix(self, x, idx):
        rows, time = x.shape[:2]
        q, k, v = self.attention.heads(x)
        positions = torch.arange(time)
        self.write(self.cache_k, rows, positions, k)
        self.write(self.cache_v, rows, positions, v)
        return self.attention.attend(q, self.cache_k[:rows, :time], self.cache_v[:rows, :time], self.mask(idx))


class ByIndexCopy(ByPositions):
    def write(self, cache, rows, positions, new):
        cache[:rows].index_copy_(1, positions, new)


class ReadWhole(AsBuffers):
    """Attention reads the whole cache of the rows; the table of positions has more positions than the cache."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(2 * BLOCK, WIDTH)

    def mix(self, x, idx):
        rows, time = x.shape[:2]
        q, k, v = self.attention.heads(x)
        positions = torch.arange(time)
        self.cache_k[:rows, positions] = k
        self.cache_v[:rows, positions] = v
        mask = torch.arange(BLOCK)[None] > positions[:, None]
        return self.attention.attend(q, self.cache_k[:rows], self.cache_v[:rows], mask)


CASES = [
    Case("cache-attributes", WithStartPosition, exports_file=True),
    Case("cache-buffers", AsBuffers),
    Case("cache-by-positions", ByPositions),
    Case("cache-by-index-copy", ByIndexCopy),
    Case("cache-read-whole", ReadWhole),
]
