"""Masks that follow from sizes, made in other ways than by torch's operations on the length."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from support.handwritten_case import BLOCK, Case
from tiny import TinyDecoder


class LoopOverRows(TinyDecoder):
    def mask(self, idx):
        time = idx.shape[1]
        mask = torch.zeros(time, time, dtype=torch.bool)
        for i in range(time):
            mask[i, i + 1 :] = True
        return mask


class IndexAssignment(TinyDecoder):
    def mask(self, idx):
        time = idx.shape[1]
        mask = torch.zeros(time, time, dtype=torch.bool)
        rows, columns = torch.triu_indices(time, time, 1)
        mask[rows, columns] = True
        return mask


class TriangleOfScores(TinyDecoder):
    """The scores of future positions are overwritten in their place."""

    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.triu_indices(idx.shape[1], idx.shape[1], offset=1)
        scores[..., later[0], later[1]] = float("-inf")
        return self.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Numpy(TinyDecoder):
    """The annotated Transformer's subsequent_mask, in the form of its first edition."""

    def mask(self, idx):
        shape = (1, idx.size(-1), idx.size(-1))
        subsequent = np.triu(np.ones(shape), k=1).astype("uint8")
        return torch.from_numpy(subsequent) == 1


class GrownTable(TinyDecoder):
    """A table in an attribute, made again when a longer one is needed."""

    def __init__(self):
        super().__init__()
        self.table = None

    def mask(self, idx):
        time = idx.shape[1]
        if self.table is None or self.table.shape[0] < time:
            self.table = torch.ones(time, time).triu(1).bool()
        return self.table[:time, :time]


class BufferOfForward(TinyDecoder):
    """Biases that forward registers as a buffer, and a choice by the data that a trace cannot follow."""

    def mix(self, x, idx):
        time = idx.shape[1]
        if not hasattr(self, "bias") or self.bias.shape[-1] < time:
            distances = torch.arange(time) - torch.arange(time)[:, None]
            self.register_buffer("bias", -0.1 * distances.abs().float(), persistent=False)
        if not (idx >= 0).all():
            raise ValueError("ids are not negative")
        scores = self.bias[:time, :time].masked_fill(torch.ones(time, time).triu(1).bool(), float("-inf"))
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        return self.attention.out(F.scaled_dot_product_attention(q, k, v, scores).transpose(1, 2).flatten(2))


class SameSizeAsBefore(TinyDecoder):
    """PyTorch's word language model: the mask is made again when the length changes."""

    def __init__(self):
        super().__init__()
        self.src_mask = None

    def mask(self, idx):
        src = idx.t()
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        return self.src_mask < 0


class BlockByBlock(TinyDecoder):
    """Each block of four positions sees itself and the block before. Its rows of the mask are joined from pieces."""

    def mask(self, idx):
        time, rows = idx.shape[1], []
        for block in range(math.ceil(time / 4)):
            begin, end = max(0, 4 * block - 4), min(4 * block + 4, time)
            height = end - 4 * block
            pieces = torch.zeros(height, begin), torch.ones(height, end - begin), torch.zeros(height, time - end)
            rows.append(torch.cat(pieces, 1))
        return torch.cat(rows).tril() == 0

    def feed_forward(self, x):
        """No rows of the later blocks are in front."""
        blocks = range(1, math.ceil(x.shape[1] / 4))
        return super().feed_forward(torch.cat([*(x[:, 4 * block : 4 * block] for block in blocks), x], 1))


class ConditionOnMask(TinyDecoder):
    def mask(self, idx):
        mask = torch.ones(idx.shape[1], idx.shape[1]).triu(1).bool()
        return mask if mask.any().item() else None


class CausalBySize(TinyDecoder):
    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.attention.out(attended.transpose(1, 2).flatten(2))


class PositionsAsList(TinyDecoder):
    def mix(self, x, idx):
        distances = torch.tensor([1 / (1 + i) for i in range(int(x.shape[1]))])
        return self.attention(x + distances[:, None], self.mask(idx))


class MaskByProduct(TinyDecoder):
    """The first GPT: scores times a mask of 1 and 0, minus a large number where it is 0."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2) for part in self.attention.heads(x))
        w = q @ k.transpose(-2, -1) / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - nd : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        return self.attention.out((w.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SumOfBools(TinyDecoder):
    """Masks of truth values joined by a sum, one of them of the ids."""

    def mix(self, x, idx):
        time = idx.shape[1]
        hidden = (idx == 7).unsqueeze(-2).expand(-1, time, -1) + torch.ones(time, time, dtype=torch.bool).triu(1)
        hidden = hidden * ~torch.eye(time, dtype=torch.bool)
        return self.attention(x, hidden[:, None])


CASES = [
    Case("mask-product", MaskByProduct, exports_file=True),
    Case("mask-sum-of-bools", SumOfBools, exports_file=True),
    Case("mask-loop", LoopOverRows, exports_file=True),
    Case("mask-indices", IndexAssignment),
    Case("mask-triangle-of-scores", TriangleOfScores, exports_file=True),
    Case("mask-numpy", Numpy),
    Case("mask-grown", GrownTable, exports_file=True),
    Case("mask-buffer-of-forward", BufferOfForward, exports_file=True),
    Case("mask-same-size", SameSizeAsBefore, exports_file=True),
    Case("mask-blocks", BlockByBlock, exports_file=True, thorough=True),
    Case("mask-condition", ConditionOnMask),
    Case("causal-by-size", CausalBySize),
    Case("positions-list", PositionsAsList),
]
