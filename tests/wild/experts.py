"""Mixtures of experts that loop over the experts which their data take."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import WIDTH, TinyDecoder

EXPERTS, TAKEN = 4, 2


class UniqueExperts(TinyDecoder):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def numbers(self, chosen):
        """Return the experts that have positions."""
        return [int(number) for number in chosen.unique()]

    def feed_forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(TAKEN)
        total = torch.zeros_like(flat)
        for number in self.numbers(chosen):
            rows, places = torch.where(chosen == number)
            total[rows] += weights[rows, places, None] * self.experts[number](flat[rows])
        return total.view_as(x)


class CountedExperts(UniqueExperts):
    def numbers(self, chosen):
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        return [number for number in range(EXPERTS) if counts[number] != 0]


class SkippedExperts(UniqueExperts):
    """The mixture of Mixtral: an expert without positions is skipped, by a size that follows from data."""

    def is_without_rows(self, rows):
        return rows.shape[0] == 0

    def feed_forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(TAKEN)
        total = torch.zeros_like(flat)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            places, rows = torch.where(mask[number])
            if self.is_without_rows(rows):
                continue
            taken, of_rows = self.lists(rows), self.lists(places)
            states = flat[None, taken].reshape(-1, WIDTH)
            states = self.experts[number](states) * weights[taken, of_rows, None]
            total.index_add_(0, rows, states)
        return total.view_as(x)

    def lists(self, indices):
        return indices


class SkippedByCount(SkippedExperts):
    def is_without_rows(self, rows):
        return rows.numel() == 0


class IndexLists(SkippedExperts):
    """Its first edition, which indexes by lists."""

    def lists(self, indices):
        return indices.tolist()


class IdleExperts(SkippedExperts):
    """A router that sends hardly anything to some of eight experts, as routers that were not trained do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * EXPERTS))
        with torch.no_grad():
            self.gate.weight *= 0.1
            self.gate.bias[5:] -= 1.0

    def feed_forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(TAKEN)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.shape[0]:
                total[rows] += expert(flat[rows]) * weights[rows, places, None]
        return total.view_as(x)


class IdleExpertsByMask(IdleExperts):
    """The mixture of tutorials: a mask of the positions of each expert, which is skipped if it has none."""

    def feed_forward(self, x):
        scores = self.gate(x)
        best, chosen = scores.topk(TAKEN, -1)
        gates = torch.full_like(scores, float("-inf")).scatter(-1, chosen, best).softmax(-1).view(-1, 2 * EXPERTS)
        total, flat = torch.zeros_like(x), x.view(-1, WIDTH)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                taken = mask.view(-1)
                total[mask] += expert(flat[taken]) * gates[taken, number, None]
        return total


class MaskedExperts(UniqueExperts):
    """Each position has one expert. Nothing asks whether an expert has any."""

    def feed_forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        total = torch.zeros_like(flat)
        for number in range(EXPERTS):
            mask = chosen == number
            total[mask] = self.experts[number](flat[mask]) * weights[mask].unsqueeze(-1)
        return total.view_as(x)


class ExpertsOfIds(UniqueExperts):
    """The ids choose the experts, in tensors of two axes."""

    def mix(self, x, idx):
        mixed = super().mix(x, idx)
        total = torch.empty_like(mixed)
        for number in range(EXPERTS):
            mask = idx % EXPERTS == number
            total[mask] = self.experts[number](mixed[mask])
        return total

    def feed_forward(self, x):
        return torch.zeros_like(x)


class MixedSelectedRows(MaskedExperts):
    """The rows of an expert change each other, so that they cannot be computed with those of others."""

    def feed_forward(self, x):
        flat = x.view(-1, WIDTH)
        mask = self.gate(flat).argmax(-1) == 1
        total = torch.zeros_like(flat)
        total[mask] = flat[mask] - flat[mask].mean(0)
        return total.view_as(x)


class OtherPathOfFewRows(SkippedExperts):
    """An expert with one row is skipped too, as no expert of many rows would show."""

    def is_without_rows(self, rows):
        return rows.shape[0] < 2


CASES = [
    Case("experts-unique", UniqueExperts, exports_file=True),
    Case("experts-counted", CountedExperts),
    Case("experts-skipped", SkippedExperts, exports_file=True, thorough=True),
    Case("experts-skipped-by-count", SkippedByCount, thorough=True),  # experts-skipped by another count of the rows
    Case("experts-idle", IdleExperts, exports_file=True, thorough=True),
    Case("experts-idle-by-mask", IdleExpertsByMask, thorough=True),
    Case("experts-masked", MaskedExperts, exports_file=True),
    Case("experts-of-ids", ExpertsOfIds),
    Case("experts-mixed-rows", MixedSelectedRows, refusal="makes a tensor whose size depends on the data"),
    # Twenty seconds for a sentence that experts-other-path gets too.
    Case("experts-index-lists", IndexLists, refusal="lets the values of its data decide", thorough=True),
    Case("experts-other-path", OtherPathOfFewRows, refusal="lets the values of its data decide"),
]
