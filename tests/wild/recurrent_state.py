"""States that are carried from position to position: recurrent layers, linear attention, state-space models.

A loop over positions in Python is traced by example, and decoded from its states.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import HEADS, WIDTH, TinyDecoder


class LinearAttention(TinyDecoder):
    """A sum of products of keys and values, and its norm, for each head."""

    def mix(self, x, idx):
        q, k, v = self.attention.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        batch, time, heads, width = q.shape
        state, norm = torch.zeros(batch, heads, width, width), torch.zeros(batch, heads, width)
        rows = []
        for t in range(time):
            state = state + torch.einsum("bhi,bhj->bhij", k[:, t], v[:, t])
            norm = norm + k[:, t]
            read = torch.einsum("bhi,bhij->bhj", q[:, t], state)
            rows.append(read / torch.einsum("bhi,bhi->bh", q[:, t], norm)[..., None])
        return self.attention.out(torch.stack(rows, dim=1).flatten(2))


class SelectiveScan(TinyDecoder):
    """A state-space model whose steps follow from the input, behind a convolution."""

    SIZE, RANK = 4, 2

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.x_proj, self.dt_proj = nn.Linear(WIDTH, self.RANK + 2 * self.SIZE), nn.Linear(self.RANK, WIDTH)
        self.a_log, self.d = nn.Parameter(torch.rand(WIDTH, self.SIZE)), nn.Parameter(torch.ones(WIDTH))

    def mix(self, x, idx):
        batch, length, _ = x.shape
        x, gate = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        delta, b, c = self.x_proj(x).split([self.RANK, self.SIZE, self.SIZE], -1)
        delta = F.softplus(self.dt_proj(delta))
        decay = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.a_log))
        inputs = delta.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        state, ys = torch.zeros((batch, WIDTH, self.SIZE)), []
        for i in range(length):
            state = decay[:, i] * state + inputs[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, c[:, i, :]))
        return self.out_proj((torch.stack(ys, dim=1) + x * self.d) * F.silu(gate))


class WeightedKeyValues(TinyDecoder):
    """The average of values with exponential weights, in a numerically safe form with the greatest exponent so far.

    Rows are written into a tensor.
    """

    def __init__(self):
        super().__init__()
        self.decay, self.bonus = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def mix(self, x, idx):
        shifted = F.pad(x, (0, 0, 1, -1))
        r, k, v = self.attention.qkv(x + shifted).split(WIDTH, -1)
        decay, output = -torch.exp(self.decay), torch.empty_like(v)
        top, bottom = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        greatest = torch.full_like(k[:, 0], -1e38)
        for t in range(x.size(1)):
            key, value = k[:, t], v[:, t]
            reached = torch.maximum(greatest, self.bonus + key)
            old, new = torch.exp(greatest - reached), torch.exp(self.bonus + key - reached)
            output[:, t] = (old * top + new * value) / (old * bottom + new)
            reached = torch.maximum(greatest + decay, key)
            old, new = torch.exp(greatest + decay - reached), torch.exp(key - reached)
            top, bottom, greatest = old * top + new * value, old * bottom + new, reached
        return self.attention.out(torch.sigmoid(r) * output)


class GatedDeltaRule(TinyDecoder):
    """A fast-weight memory: each key's old value is replaced in part by its new one."""

    def __init__(self):
        super().__init__()
        self.beta, self.gate = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)

    def mix(self, x, idx):
        q, k, v = (part.transpose(1, 2).contiguous() for part in self.attention.heads(x))
        beta, gate = self.beta(x).sigmoid().transpose(1, 2), F.logsigmoid(self.gate(x)).transpose(1, 2)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        batch, heads, length, width = q.shape
        output = torch.zeros(batch, heads, length, width).to(v)
        memory = torch.zeros(batch, heads, width, width).to(v)
        for i in range(length):
            memory = memory * gate[:, :, i].exp()[..., None, None]
            known = (memory * k[:, :, i].unsqueeze(-1)).sum(-2)
            change = (v[:, :, i] - known) * beta[:, :, i].unsqueeze(-1)
            memory = memory + k[:, :, i].unsqueeze(-1) * change.unsqueeze(-2)
            output[:, :, i] = (memory * q[:, :, i].unsqueeze(-1)).sum(-2)
        return self.attention.out(output.transpose(1, 2).flatten(2))


class GruModel(nn.Module):
    """A language model of two recurrent layers of torch, without attention."""

    def __init__(self):
        super().__init__()
        tiny = TinyDecoder()
        self.tokens, self.norm, self.head = tiny.tokens, tiny.norm, tiny.head
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, idx):
        hidden, _ = self.rnn(3 * self.tokens(idx))
        return self.head(self.norm(hidden + self.tokens(idx) / 2))


class LstmModel(GruModel):
    """Long short-term memory, with a projection of its results, over (time, batch, width)."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH)

    def forward(self, idx):
        hidden, _ = self.rnn(3 * self.tokens(idx).transpose(0, 1))
        return self.head(self.norm(hidden.transpose(0, 1)))


class CellsAndAttention(TinyDecoder):
    """Attention, a cell of torch with a learned first state, and attention again."""

    def __init__(self):
        super().__init__()
        self.cell, self.first = nn.LSTMCell(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def mix(self, x, idx):
        x = x + self.attention(x, self.mask(idx))
        hidden, cell = self.first.expand(x.shape[0], -1), torch.zeros(x.shape[0], WIDTH)
        rows = []
        for row in x.unbind(1):
            hidden, cell = self.cell(row, (hidden, cell))
            rows.append(hidden.unsqueeze(1))
        return self.attention(torch.cat(rows, 1), self.mask(idx))


class BothDirections(GruModel):
    """A recurrent layer that looks ahead."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)


class GrowingState(TinyDecoder):
    """A loop whose state grows by a row for each position."""

    def mix(self, x, idx):
        seen, rows = x[:, :0], []
        for t in range(x.shape[1]):
            seen = torch.cat([seen, x[:, t : t + 1]], 1)
            rows.append(torch.logsumexp(seen, 1))
        return self.attention(torch.stack(rows, 1), self.mask(idx))


CASES = [
    Case("linear-attention", LinearAttention),
    Case("selective-scan", SelectiveScan),
    Case("weighted-key-values", WeightedKeyValues, thorough=True),
    Case("gated-delta-rule", GatedDeltaRule),
    Case("gru", GruModel),
    Case("lstm", LstmModel),
    Case("cells-and-attention", CellsAndAttention),
    Case("both-directions", BothDirections, refusal="looks ahead"),
    Case("growing-state", GrowingState, refusal="a value has another shape in each run"),
]
