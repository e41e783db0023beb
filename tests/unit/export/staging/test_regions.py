"""Regions: operations that keep positions apart only together, their caches, and refused operations."""

from __future__ import annotations

import math

import pytest
import torch
from support.small_models import Mixer, Small, causal, joined, staged
from torch import nn

from tformer_runtime import UnsupportedModelError


class Sorted(Mixer):
    """Rows of all positions are sorted by a score, processed and put back, as in a mixture of experts."""

    def forward(self, x, tgt):
        rows = x.reshape(-1, x.shape[2])
        order = rows[:, 0].argsort()
        worked = torch.tanh(rows[order])
        return worked[order.argsort()].view_as(x)


class Gathered(Mixer):
    """Each expert selects its rows by a mask and adds its results to the same rows."""

    def forward(self, x, tgt):
        rows = x.reshape(-1, x.shape[2])
        chosen = (rows @ self.projections[0].weight[:3].T).argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.projections):
            (where,) = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, where, expert(rows[where]))
        return out.view_as(x)


class Sink(Mixer):
    """Softmax over the keys and one additional score, which is dropped afterwards."""

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
    """Rows in the order of a score, without restoring the order."""

    def forward(self, x, tgt):
        return x.gather(1, x[..., :1].argsort(1).expand_as(x))


@pytest.mark.parametrize("mixer", [Sorted, Gathered])
def test_restored_order_of_rows_needs_no_cache(mixer):
    stages = staged(Small(mixer))
    assert not stages.solver.cuts
    assert any(len(solution.nodes) > 3 for solution in stages.solver.solutions.values())


def test_attention_with_sink_caches_keys_and_values_only():
    stages = staged(Small(Sink))
    shapes = [sorted(stages.values[node].shape) for node in stages.solver.cuts]
    assert shapes == [[2, 2, 6, 8]] * 2  # batch, heads, time and d in some order, without the column of the sink


def test_unrestored_order_is_refused():
    with pytest.raises(UnsupportedModelError, match="argsort"):
        staged(Small(Unsorted))
