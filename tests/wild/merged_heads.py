"""Heads on the axis of the batch, (heads · batch, time, d), as in ports of TensorFlow code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import HEADS, WIDTH, TinyDecoder

HIDDEN = -(2.0**32) + 1


class SplitBySize(TinyDecoder):
    """torch.cat(Q.split(d, 2), 0), and back by the size of the batch."""

    def mix(self, x, idx):
        d = WIDTH // HEADS
        Q, K, V = (torch.cat(part.flatten(2).split(d, 2), 0) for part in self.attention.heads(x))
        scores = (Q @ K.transpose(1, 2) / d**0.5).masked_fill(self.mask(idx), float("-inf"))
        return self.attention.out(torch.cat((scores.softmax(-1) @ V).split(x.size(0), 0), 2))


class MasksFromValues(TinyDecoder):
    """The masks of Kyubyong Park's port: keys and queries whose embedding is zero, repeated for each head."""

    def mix(self, x, idx):
        Q, K, V = (torch.cat(torch.chunk(part.flatten(2), HEADS, dim=2), dim=0) for part in self.attention.heads(x))
        outputs = torch.bmm(Q, K.permute(0, 2, 1)) / (K.size()[-1] ** 0.5)
        present = torch.sign(torch.abs(torch.sum(self.tokens(idx), dim=-1))).repeat(HEADS, 1)
        key_masks = present.unsqueeze(1).repeat(1, x.size(1), 1)
        outputs = self.hide(outputs, key_masks)
        tril = torch.tril(torch.ones(*outputs[0].size())).unsqueeze(0).repeat(outputs.size(0), 1, 1)
        outputs = F.softmax(self.hide(outputs, tril), dim=-1)
        outputs = outputs * present.unsqueeze(2).repeat(1, 1, x.size(1))
        return self.attention.out(torch.cat(torch.chunk(torch.bmm(outputs, V), HEADS, dim=0), dim=2))

    def hide(self, outputs, keep):
        condition = keep.eq(0.0).float()
        return torch.ones_like(keep) * HIDDEN * condition + outputs * (1.0 - condition)


CASES = [
    Case("heads-split-by-size", SplitBySize),
    Case("heads-masks-from-values", MasksFromValues, seed=1, thorough=True),
]
