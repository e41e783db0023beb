"""Models that read the last few positions outside attention: convolutions over time and shifted tokens."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import VOCABULARY, Case
from tiny import WIDTH, TinyDecoder


class PaddedConvolution(TinyDecoder):
    """A convolution with padding on both sides, whose last rows are cut off."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def mix(self, x, idx):
        local = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.attention(F.silu(local), self.mask(idx))


class DilatedConvolution(TinyDecoder):
    """A convolution over rows that are padded in front."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, dilation=5)

    def mix(self, x, idx):
        return self.attention(x, self.mask(idx)) + self.conv(F.pad(x.transpose(1, 2), (10, 0))).transpose(1, 2)


class WidelyDilatedConvolution(TinyDecoder):
    """Convolutions whose dilation grows from layer to layer, as in WaveNet."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 2, padding=n, dilation=n) for n in (1, 4, 8))

    def mix(self, x, idx):
        local = x.transpose(1, 2)
        for conv in self.convs:
            local = torch.tanh(conv(local)[..., : x.shape[1]])
        return self.attention(x, self.mask(idx)) + local.transpose(1, 2)


class ConvolvedKeys(TinyDecoder):
    """Convolutions of queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)

    def mix(self, x, idx):
        qkv = self.conv(self.attention.qkv(x).transpose(1, 2))[..., :-2].transpose(1, 2)
        heads = [part.unflatten(2, (3, -1)) for part in qkv.split(WIDTH, -1)]
        return self.attention.attend(*heads, self.mask(idx))


class TokenShift(TinyDecoder):
    """Half of the channels are those of the position before."""

    def mix(self, x, idx):
        shifted = nn.ZeroPad2d((0, 0, 1, -1))(x)
        return self.attention(torch.cat([shifted[..., : WIDTH // 2], x[..., WIDTH // 2 :]], -1), self.mask(idx))


class SmearGate(TinyDecoder):
    """The position before is added with a learned weight. The first position has none before it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def mix(self, x, idx):
        smeared = torch.cat([x[:, :1], x[:, 1:] + torch.sigmoid(self.gate(x[:, 1:])) * x[:, :-1]], 1)
        return self.attention(smeared, self.mask(idx))


class LearnedStart(TinyDecoder):
    """The position before the first is a learned vector."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))

    def mix(self, x, idx):
        return self.attention(x + torch.cat([self.start.expand(x.shape[0], -1, -1), x[:, :-1]], 1), self.mask(idx))


class PairsOfTokens(TinyDecoder):
    """An embedding of each token with the one before it, by a hash of both ids."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Embedding(101, WIDTH)

    def mix(self, x, idx):
        before = torch.cat([torch.zeros_like(idx[:, :1]), idx[:, :-1]], 1)
        return self.attention(x + self.pairs((before * VOCABULARY + idx) % 101), self.mask(idx))


class RunningMean(TinyDecoder):
    """The mean of all positions so far."""

    def mix(self, x, idx):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.attention(x + x.cumsum(1) / counts, self.mask(idx))


class DecayingSum(TinyDecoder):
    """A linear recurrence, computed for all positions at once by cumulative sums."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Linear(WIDTH, WIDTH)

    def mix(self, x, idx):
        decay = F.logsigmoid(self.decay(x)).cumsum(1)
        return self.attention(torch.exp(decay) * (x * torch.exp(-decay)).cumsum(1), self.mask(idx))


class SumInLogarithms(TinyDecoder):
    """A gated linear recurrence, computed for all positions at once from logarithms."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def mix(self, x, idx):
        gate = 4 + self.gate(x)  # the logarithms of the sums grow by 4 with each position
        coefficients = -F.softplus(gate).cumsum(1)
        values = F.logsigmoid(gate) + F.logsigmoid(x)
        return self.attention(torch.exp(coefficients + (values - coefficients).logcumsumexp(1)), self.mask(idx))


class UnfoldedWindows(TinyDecoder):
    """A window of four positions for each position, as a tensor, with learned weights."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4))

    def mix(self, x, idx):
        windows = F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1)  # (batch, time, width, 4)
        return self.attention(windows @ self.weights, self.mask(idx))


CASES = [
    Case("convolution-padded", PaddedConvolution, exports_file=True),
    Case("convolution-dilated", DilatedConvolution),
    Case("convolution-dilated-widely", WidelyDilatedConvolution),
    Case("convolution-of-keys", ConvolvedKeys, exports_file=True),
    Case("token-shift", TokenShift),
    Case("smear-gate", SmearGate),
    Case("learned-start", LearnedStart),
    Case("token-pairs", PairsOfTokens),
    Case("running-mean", RunningMean, exports_file=True),
    Case("decaying-sum", DecayingSum),
    Case("sum-in-logarithms", SumInLogarithms, exports_file=True, thorough=True),
    Case("unfolded-windows", UnfoldedWindows),
]
