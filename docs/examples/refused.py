"""Models that tformer-export refuses, each for another reason: the models of docs/refusals.md.

`NoCausalMask` and its like are one layer of a small language model each. `model(NoCausalMask)` makes the model, and
`tformer-export docs.examples.refused:no_causal_mask` refuses it on the command line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCABULARY, HEADS = 16, 23, 2
EXAMPLE = {"ids": torch.tensor([[3, 4, 5, 6]])}


class LanguageModel(nn.Module):
    """An embedding, one layer and a projection to logits."""

    def __init__(self, layer: Callable[[], nn.Module], project: Callable[[], nn.Module] = nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), layer()
        self.logits, self.finish = nn.Linear(WIDTH, VOCABULARY), project()

    def forward(self, ids):
        x = self.embed(ids)
        return self.finish(self.logits(x + self.layer(x)))


class Attention(nn.Module):
    """Causal attention, which is accepted. Subclasses are refused."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x):
        """Queries, keys and values, (batch, heads, time, size)."""
        return self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class NoCausalMask(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class BothDirections(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.gru(x)[0]


class CentredConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class GrowingLoop(Attention):
    def forward(self, x):
        rows = [x[:, : t + 1].amax(1) for t in range(x.shape[1])]
        return torch.stack(rows, 1)


class DataDecides(Attention):
    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else x


class NumberOfData(Attention):
    def forward(self, x):
        return super().forward(x) * x.abs().max().item()


class DropoutLeftOn(Attention):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1)


class KeepsState(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class RowsMeet(Attention):
    def forward(self, x):
        return super().forward(x) - x.mean(0, keepdim=True)


class NotFinite(Attention):
    def forward(self, x):
        return torch.log(super().forward(x))


class MeanOverPositions(nn.Module):
    def forward(self, logits):
        return logits.mean(1)


class Softmax(nn.Module):
    def forward(self, logits):
        return logits.softmax(-1)


def model(layer: Callable[[], nn.Module], finish: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    return LanguageModel(layer, finish).eval()


def no_causal_mask():
    """A factory for the command line: module, example inputs, arguments of export()."""
    return model(NoCausalMask), EXAMPLE, {"step_input": "ids"}
