"""Operations that keep positions apart only together: what is taken in, what is cached, and what stays refused."""

from __future__ import annotations

import math

import pytest
import torch
from support.small_models import Mixer, Small, causal, joined, staged
from torch import nn

from tformer_runtime import UnsupportedModelError


class Sorted(Mixer):
    """Rows of all positions in the order of a score, worked on, and put back: what a mixture of experts does."""

    def forward(self, x, tgt):
        rows = x.reshape(-1, x.shape[2])
        order = rows[:, 0].argsort()
        worked = torch.tanh(rows[order])
        return worked[order.argsort()].view_as(x)


class Gathered(Mixer):
    """Each expert takes its rows by a mask, however many they are, and adds its results where they belong."""

    def forward(self, x, tgt):
        rows = x.reshape(-1, x.shape[2])
        chosen = (rows @ self.projections[0].weight[:3].T).argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.projections):
            (where,) = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, where, expert(rows[where]))
        return out.view_as(x)


class Sink(Mixer):
    """Softmax over the keys and one score more, which is dropped afterwards."""

    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(2))

    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(2, 3)).masked_fill(~causal(x), -math.inf)
        sink = self.sink[None, :, None, None].expand(x.shape[0], -1, x.shape[1], -1)
        scores = torch.cat([scores, sink], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return joined(scores.softmax(-1)[..., :-1] @ v)


class Unsorted(Mixer):
    """Rows in the order of a score, and not put back."""

    def forward(self, x, tgt):
        return x.gather(1, x[..., :1].argsort(1).expand_as(x))


@pytest.mark.parametrize("mixer", [Sorted, Gathered])
def test_what_is_put_back_needs_no_past(mixer):
    found = staged(Small(mixer))
    assert not found.solver.cuts
    assert any(len(solution.nodes) > 3 for solution in found.solver.solutions.values())


def test_an_attention_with_a_sink_caches_keys_and_values_alone():
    found = staged(Small(Sink))
    shapes = [sorted(found.values[node].shape) for node in found.solver.cuts]
    assert shapes == [[2, 2, 6, 8]] * 2  # batch, heads, time and d in some order, without the column of the sink


def test_what_is_not_put_back_is_refused():
    with pytest.raises(UnsupportedModelError, match="argsort"):
        staged(Small(Unsorted))
