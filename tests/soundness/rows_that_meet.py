"""Models in which a row of a batch changes another, by values that a drawn example does not have."""

from __future__ import annotations

import torch

from soundness.models import RARE, VOCABULARY, WIDTH, Decoder, Encoder, ids, numbers, suspect

RARE_BESIDE = [ids(9, 9, rare_at=3)[::-1], ids(5, 5, 5, rare_at=0)[::-1]]
LOUD_BESIDE = [numbers(9, 9, factor=100.0)[::-1]]
MANY = [ids(*[10] * 20)]


@suspect(RARE_BESIDE)
class RareIdInAnyRow(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).any(0)[:, None]


@suspect(RARE_BESIDE, thorough=True)
class RareIdAnywhere(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).any()


@suspect(RARE_BESIDE)
class GreatestIdOfAll(Decoder):
    def change(self, x, ids):
        return x * torch.where(ids.max() >= RARE, 2.0, 1.0)


@suspect(RARE_BESIDE)
class NeighbourOfRareIds(Decoder):
    def change(self, x, ids):
        return torch.where((ids.roll(1, 0) == RARE)[..., None], x.roll(1, 0), x)


@suspect([ids(9, 9, rare_at=3), ids(9, 9, rare_at=3)[::-1]])
class FirstRowForRareIds(Decoder):
    def change(self, x, ids):
        return torch.where((ids == RARE)[..., None], x[:1], x)


@suspect(RARE_BESIDE)
class CountsRareIdsOfTheRowsBefore(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).float().cumsum(0)[..., None]


@suspect(RARE_BESIDE, thorough=True)
class CountsRareIdsOfTheRowsAfter(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).float().flip(0).cumsum(0).flip(0)[..., None]


@suspect([[torch.tensor([5, 6, 7]), torch.tensor([RARE, RARE, RARE])]])
class HistogramOfAllIds(Decoder):
    def change(self, x, ids):
        counts = torch.zeros(VOCABULARY).scatter_add(0, ids.flatten(), torch.ones(ids.numel()))
        return x * torch.where(counts[RARE] > 2, 2.0, 1.0)


@suspect(LOUD_BESIDE)
class ScaleOfTheLoudest(Encoder):
    def change(self, x):
        return x / x.abs().amax((0, 2)).clamp(min=20)[:, None]


@suspect(LOUD_BESIDE)
class MeanOfTheLoud(Encoder):
    def change(self, x):
        return x + torch.relu(x - 30).mean(0)


@suspect(LOUD_BESIDE)
class SpreadOfTheBatch(Encoder):
    def change(self, x):
        return x * (x.std() > 10)  # of all rows


@suspect(LOUD_BESIDE, thorough=True)
class NormOfTheBatch(Encoder):
    def change(self, x):
        return x / torch.linalg.vector_norm(x).clamp(min=500)


@suspect([numbers(9, 9)])
class NormalisesOverTheBatch(Encoder):
    def change(self, x):
        return torch.nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)


class _Experts(Decoder):
    """Two experts for all tokens of a batch. Each takes a number of tokens, and the others pass by."""

    CAPACITY = 0

    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(WIDTH, 2), torch.nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 5)

    def capacity(self, tokens):
        return self.CAPACITY

    def change(self, x, ids):
        flat = x.flatten(0, 1)
        chosen = torch.nn.functional.one_hot(self.router(flat).argmax(-1), 2)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        taken = (place <= self.capacity(flat.shape[0])).float()[:, None]
        out = torch.einsum("td,edf,te->tf", flat, self.experts, chosen.float())
        return x + (out * taken).view(x.shape)


@suspect(MANY)
class ExpertsOfFixedCapacity(_Experts):
    CAPACITY = 60


@suspect(MANY, thorough=True)
class ExpertsOfFewTokens(_Experts):
    CAPACITY = 3


@suspect(MANY, thorough=True)
class ExpertsOfAShareOfTokens(_Experts):
    def capacity(self, tokens):
        return tokens * 2 // 3


@suspect([ids(9, 9, rare_at=0)])
class SortsTheRows(Decoder):
    def change(self, x, ids):
        return x[ids[:, 0].argsort(stable=True)]


@suspect([ids(9, 9, 9)])
class DifferentRowsOnly(Decoder):
    def change(self, x, ids):
        return x * torch.unique(ids[:, 0]).shape[0]


@suspect([[torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7])]])
class EqualRows(Decoder):
    """Rows that are equal to another row, as no drawn rows are."""

    def change(self, x, ids):
        same = (ids[:, None] == ids[None]).all(-1).sum(-1) > 1
        return torch.where(same[:, None, None], x * 2, x)
