"""Mixtures of experts that loop over the experts which their data take."""

from __future__ import annotations

import torch
import torch.nn as nn
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


CASES = [
    Case("experts-unique", UniqueExperts, exports_file=True),
    Case("experts-counted", CountedExperts),
]
