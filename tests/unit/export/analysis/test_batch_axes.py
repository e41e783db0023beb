"""Batch axes: the axis of a value that holds the rows of a batch is found, alone or merged with another axis."""

from __future__ import annotations

import math

import pytest
import torch
from support.small_models import HEADS, Mixer, Small, causal, staged

from tformer_export.analysis.batch_axes import BatchAxis


class Merged(Mixer):
    """Heads merged with the batch, before or after it, as code for bmm does. A division prevents that keys are cached
    before they are merged."""

    def merge_heads(self, x):
        raise NotImplementedError

    def split_heads(self, x, batch):
        raise NotImplementedError

    def forward(self, x, tgt):
        q, k, v = (self.merge_heads(h) / 2.0 for h in self.heads(x))
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(~causal(x), -math.inf)
        return self.split_heads(torch.bmm(scores.softmax(-1).square(), v), x.shape[0]).transpose(1, 2).flatten(2)


class HeadsInside(Merged):
    def merge_heads(self, x):
        return x.reshape(-1, x.shape[2], x.shape[3])

    def split_heads(self, x, batch):
        return x.view(batch, HEADS, x.shape[1], x.shape[2])


class HeadsOutside(Merged):
    def merge_heads(self, x):
        return x.transpose(0, 1).reshape(-1, x.shape[2], x.shape[3])

    def split_heads(self, x, batch):
        return x.view(HEADS, batch, x.shape[1], x.shape[2]).transpose(0, 1)


@pytest.mark.parametrize(("mixer", "outer"), [(HeadsInside, True), (HeadsOutside, False)])
def test_order_of_merged_axes_is_found(mixer, outer):
    solver = staged(Small(mixer)).solver
    assert len(solver.cuts) == 2
    assert {solver.rows(node) for node in solver.cuts} == {BatchAxis(0, HEADS, outer)}


@pytest.mark.parametrize(
    "rows", [BatchAxis(1), BatchAxis(0, 3), BatchAxis(0, 3, outer=False), BatchAxis(2, 2), BatchAxis(2, 2, outer=False)]
)
def test_split_and_merge_are_inverse(rows):
    batch = 5
    shape = [2, 3, 4]
    shape[rows.axis] = batch * rows.times
    value = torch.randn(shape)

    def run(function, *args):
        return function(*args)

    separate = rows.split(run, value)
    assert separate.shape == rows.shape(tuple(shape), batch)
    assert separate.shape[rows.batch_axis] == batch
    assert torch.equal(rows.merge(run, separate), value)
    start = [0, 1] if rows.outer else [0, batch]
    if rows.times > 1:
        first = value.index_select(rows.axis, torch.tensor(start))  # two entries of the first row
        assert torch.equal(separate.select(rows.batch_axis, 0).narrow(rows.axis, 0, 2), first)
