"""Where a value has the rows of a batch: on an axis of their own or merged with another, found and taken apart."""

from __future__ import annotations

import math

import pytest
import torch
from support.small_models import HEADS, Mixer, Small, causal, staged

from tformer_export.analysis.batch_axes import BatchAxis


class Merged(Mixer):
    """Heads beside the batch, before it or after it, as people do to use bmm; a division keeps keys from being cached
    before they are merged."""

    def merged(self, x):
        raise NotImplementedError

    def apart(self, x, batch):
        raise NotImplementedError

    def forward(self, x, tgt):
        q, k, v = (self.merged(h) / 2.0 for h in self.heads(x))
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(~causal(x), -math.inf)
        return self.apart(torch.bmm(scores.softmax(-1), v), x.shape[0]).transpose(1, 2).flatten(2)


class HeadsInside(Merged):
    def merged(self, x):
        return x.reshape(-1, x.shape[2], x.shape[3])

    def apart(self, x, batch):
        return x.view(batch, HEADS, x.shape[1], x.shape[2])


class HeadsOutside(Merged):
    def merged(self, x):
        return x.transpose(0, 1).reshape(-1, x.shape[2], x.shape[3])

    def apart(self, x, batch):
        return x.view(HEADS, batch, x.shape[1], x.shape[2]).transpose(0, 1)


@pytest.mark.parametrize(("mixer", "outer"), [(HeadsInside, True), (HeadsOutside, False)])
def test_the_order_is_found(mixer, outer):
    solver = staged(Small(mixer)).solver
    assert len(solver.cuts) == 2
    assert {solver.rows(node) for node in solver.cuts} == {BatchAxis(0, HEADS, outer)}


@pytest.mark.parametrize(
    "rows", [BatchAxis(1), BatchAxis(0, 3), BatchAxis(0, 3, outer=False), BatchAxis(2, 2), BatchAxis(2, 2, outer=False)]
)
def test_taken_apart_and_merged_again(rows):
    batch = 5
    shape = [2, 3, 4]
    shape[rows.axis] = batch * rows.times
    value = torch.randn(shape)

    def run(function, *args):
        return function(*args)

    apart = rows.split(run, value)
    assert apart.shape == rows.shape(tuple(shape), batch)
    assert apart.shape[rows.batch_axis] == batch
    assert torch.equal(rows.merge(run, apart), value)
    start = [0, 1] if rows.outer else [0, batch]
    if rows.times > 1:
        first = value.index_select(rows.axis, torch.tensor(start))  # of the first row, two entries
        assert torch.equal(apart.select(rows.batch_axis, 0).narrow(rows.axis, 0, 2), first)
