"""Models that cut a sequence into blocks, or count positions from its middle."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import HEADS, WIDTH, TinyDecoder

BLOCK_SIZE = 4


def merge(x):
    """(batch, time, heads, d) → (batch · heads, time, d)"""
    return x.transpose(1, 2).flatten(0, 1)


def with_block_before(x):
    """Put the block before in front of each block; the first one has zeros."""
    return torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], 2)


class BlockedAttention(TinyDecoder):
    """Attention to the own block and the block before. The sequence is padded to whole blocks."""

    def padded(self, x):
        return F.pad(x, (0, 0, 0, -x.shape[1] % BLOCK_SIZE))

    def mix(self, x, idx):
        length = x.shape[1]
        q, k, v = (self.padded(merge(part)).unflatten(1, (-1, BLOCK_SIZE)) for part in self.attention.heads(x))
        k, v = with_block_before(k), with_block_before(v)
        places = torch.arange(q.shape[1] * BLOCK_SIZE).unflatten(0, (-1, BLOCK_SIZE))
        others = torch.cat([places - BLOCK_SIZE, places], 1)
        hidden = (others[:, None, :] > places[:, :, None]) | (others[:, None, :] < 0)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -1e9)
        mixed = (scores.softmax(-1) @ v).flatten(1, 2)[:, :length]
        return self.attention.out(mixed.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2))


class RoundedUpByPython(BlockedAttention):
    """The number of padded rows is a number of Python, and whole sequences are not padded."""

    def padded(self, x):
        blocks = x.shape[1] / BLOCK_SIZE
        if blocks.is_integer():
            return x
        return F.pad(x, (0, 0, 0, math.ceil(blocks) * BLOCK_SIZE - x.shape[1]), value=0.0)


class CountedFromTheMiddle(TinyDecoder):
    """Queries grow and keys shrink with the distance from the middle; their products depend on the difference alone."""

    def mix(self, x, idx):
        length = x.shape[1]
        q, k, v = self.attention.heads(x)
        power = (torch.arange(length) - length // 2)[:, None, None] / 16
        scale = torch.linspace(0.5, 0.9, q.shape[-1]) ** power
        return self.attention.attend(q * scale, k / scale, v, self.mask(idx))


class SummedBlocks(TinyDecoder):
    """Squared scores within a block, and sums of keys and values over the blocks before."""

    size = BLOCK_SIZE

    def mix(self, x, idx):
        length = x.shape[1]
        padding = -length % self.size
        q, k, v = (
            F.pad(merge(part), (0, 0, 0, padding)).unflatten(1, (-1, self.size)) for part in self.attention.heads(x)
        )
        hidden = torch.ones(self.size, self.size, dtype=torch.bool).triu(1)
        near = (F.relu(q @ k.transpose(-2, -1) / self.size) ** 2).masked_fill(hidden, 0.0) @ v
        sums = torch.einsum("bgnd,bgne->bgde", k, v) / self.size
        far = q @ F.pad(sums.cumsum(1), (0, 0, 0, 0, 1, -1))
        near, far = (part.flatten(1, 2)[:, :length] for part in (near, far))
        return self.attention.out((near + far).unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2))


class SummedLongBlocks(SummedBlocks):
    """The same with blocks of more positions than a short sequence has."""

    size = 8


CASES = [
    Case("blocks-padded", BlockedAttention, exports_file=True),
    Case("blocks-rounded-by-python", RoundedUpByPython, exports_file=True, thorough=True),
    Case("middle-of-sequence", CountedFromTheMiddle, exports_file=True),
    Case("blocks-summed", SummedBlocks, thorough=True),  # blocks-summed-long with blocks of another size
    Case("blocks-summed-long", SummedLongBlocks, exports_file=True, thorough=True),
]
