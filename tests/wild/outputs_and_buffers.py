"""Outputs in the form of a training loss, attention without an axis of heads, and buffers that no operation reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.handwritten_case import VOCABULARY, Case
from tiny import TinyDecoder


class FlatLogits(TinyDecoder):
    def forward(self, idx):
        return super().forward(idx).view(-1, VOCABULARY)


class FlatLogitsTimeFirst(TinyDecoder):
    def forward(self, idx):
        return super().forward(idx.t()).transpose(0, 1).reshape(-1, VOCABULARY)


class OneHead(TinyDecoder):
    def mix(self, x, idx):
        q, k, v = (part.flatten(2) for part in self.attention.heads(x))
        return self.attention.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class OneHeadMasked(TinyDecoder):
    def mix(self, x, idx):
        q, k, v = (part.flatten(2) for part in self.attention.heads(x))
        mask = ~self.mask(idx).expand(x.shape[0], -1, -1)
        return self.attention.out(F.scaled_dot_product_attention(q, k, v, mask))


class SparseBuffer(TinyDecoder):
    """openai's Whisper keeps the heads that align words as a sparse buffer, which forward does not read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("alignment_heads", torch.eye(4).bool().to_sparse())


CASES = [
    Case("flat-logits", FlatLogits, exports_file=True),
    Case("flat-logits-time-first", FlatLogitsTimeFirst, time_first=True),
    Case("one-head", OneHead),
    Case("one-head-masked", OneHeadMasked),
    Case("sparse-buffer", SparseBuffer),
]
