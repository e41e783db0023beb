"""Attention that also reads keys in front of the sequence: registers, learned prefixes, a key of zeros."""

from __future__ import annotations

import torch
import torch.nn as nn
from support.handwritten_case import BLOCK, VOCABULARY, Case
from tiny import HEADS, WIDTH, TinyDecoder


class KeyOfZeros(TinyDecoder):
    """A row of zeros in front, which every position may read and whose output is dropped."""

    def mix(self, x, idx):
        rows, time, width = x.shape
        x = torch.cat([torch.zeros(rows, 1, width), x], 1)
        mask = torch.ones(time + 1, time + 1).triu(1).bool()
        return self.attention(x, mask)[:, 1:]


class LearnedPrefix(TinyDecoder):
    """Learned keys and values in front of those of the sequence (prefix tuning)."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 4, HEADS, WIDTH // HEADS))

    def mix(self, x, idx):
        q, k, v = self.attention.heads(x)
        k, v = (
            torch.cat([p.expand(x.shape[0], -1, -1, -1), part], 1) for p, part in zip(self.prefix, (k, v), strict=True)
        )
        time = x.shape[1]
        mask = torch.cat([torch.zeros(time, 4), torch.ones(time, time).triu(1)], 1).bool()
        return self.attention.attend(q, k, v, mask)


class CappedScores(KeyOfZeros):
    """Scores with a soft cap, which no fused operator computes."""

    def __init__(self):
        super().__init__()
        self.attention.attend = self.attend

    def attend(self, q, k, v, mask):
        scores = 5 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / 5)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return self.attention.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class BiasKeys(TinyDecoder):
    """PyTorch's attention with add_bias_kv and add_zero_attn, which append two keys."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True)

    def mix(self, x, idx):
        return self.attention(x, x, x, attn_mask=self.mask(idx), need_weights=False)[0]


class Registers(nn.Module):
    """Learned vectors in front of the sequence, which pass through all layers and are dropped at the end."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK + 3, WIDTH)
        self.registers = nn.Parameter(torch.randn(3, WIDTH))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx):
        x = torch.cat([self.registers.expand(idx.shape[0], -1, -1), self.tokens(idx)], 1)
        x = x + self.positions(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x[:, 3:])


CASES = [
    Case("key-of-zeros", KeyOfZeros, exports_file=True),
    Case("learned-prefix", LearnedPrefix),
    Case("capped-scores", CappedScores),
    Case("bias-keys", BiasKeys),
    Case("registers", Registers, exports_file=True),
]
