"""Copies of torch's functions with more arguments, which ask for modes of torch as the originals do."""

from __future__ import annotations

import math

import torch
from support.handwritten_case import Case
from tiny import TinyDecoder
from torch.overrides import handle_torch_function, has_torch_function


def scaled_dot_product_attention(query, key, value, attn_mask, sharpness):
    tensors = (query, key, value)
    if has_torch_function(tensors):
        original = torch.nn.functional.scaled_dot_product_attention
        return handle_torch_function(original, tensors, *tensors, attn_mask=attn_mask, sharpness=sharpness)
    scores = query @ key.transpose(-1, -2) * (sharpness / math.sqrt(query.shape[-1])) + attn_mask
    return scores.softmax(-1) @ value


class CopiedAttention(TinyDecoder):
    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        mask = torch.full((idx.shape[1], idx.shape[1]), float("-inf")).triu(1)
        return self.attention.out(scaled_dot_product_attention(q, k, v, mask, 1.5).transpose(1, 2).flatten(2))


class ByExample(CopiedAttention):
    """torch.export cannot follow the loop that makes the mask."""

    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        mask = torch.zeros(idx.shape[1], idx.shape[1])
        for i in range(idx.shape[1]):
            mask[i, i + 1 :] = float("-inf")
        return self.attention.out(scaled_dot_product_attention(q, k, v, mask, 1.5).transpose(1, 2).flatten(2))


CASES = [
    Case("copied-function", CopiedAttention),
    Case("copied-function-by-example", ByExample),
]
