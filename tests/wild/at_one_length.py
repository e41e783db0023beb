"""Models that do other operations at other lengths."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import Case
from tiny import WIDTH, TinyDecoder


def scan(decay, x):
    """Return h with h_t = decay_t · h_(t-1) + x_t, in rounds that double the number of positions in a sum."""
    step = 1
    while step < x.shape[1]:
        carried = F.pad(x, (0, 0, step, 0))[:, : x.shape[1]]
        x = x + decay * carried
        decay = decay * F.pad(decay, (0, 0, step, 0), value=1.0)[:, : x.shape[1]]
        step *= 2
    return x


def scan_of_halves(decay, x):
    """Return the same, from a scan over pairs of positions, half as long."""
    if x.shape[1] < 2:
        return x
    even, odd = slice(0, x.shape[1] - x.shape[1] % 2, 2), slice(1, None, 2)
    pairs = scan_of_halves(decay[:, odd] * decay[:, even], decay[:, odd] * x[:, even] + x[:, odd])
    result = torch.zeros_like(x)
    result[:, odd] = pairs
    result[:, 0] = x[:, 0]
    result[:, 2::2] = decay[:, 2::2] * pairs[:, : (x.shape[1] - 1) // 2] + x[:, 2::2]
    return result


class ScanByDoubling(TinyDecoder):
    def __init__(self):
        super().__init__()
        self.decay = nn.Linear(WIDTH, WIDTH)

    def mix(self, x, idx):
        return self.attention.out(scan(torch.sigmoid(self.decay(x)), x))


class ScanByHalves(ScanByDoubling):
    def mix(self, x, idx):
        return self.attention.out(scan_of_halves(torch.sigmoid(self.decay(x)), x))


class LooksAheadByHalves(ScanByDoubling):
    def mix(self, x, idx):
        decay = torch.sigmoid(self.decay(x))
        return self.attention.out(scan_of_halves(decay, x.flip(1)).flip(1))


CASES = [
    Case("scan-by-doubling", ScanByDoubling, exports_file=True, thorough=True),
    Case("scan-by-halves", ScanByHalves, exports_file=True),
    Case("halves-look-ahead", LooksAheadByHalves, refusal="takes another execution path"),
]
