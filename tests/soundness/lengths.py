"""Models that take another path at lengths that an example and a few tests do not have."""

from __future__ import annotations

import math

import torch

from soundness.models import Decoder, Encoder, ids, numbers, suspect

LONG = [numbers(5), numbers(40, 40), numbers(64, 64), numbers(500)]


@suspect(LONG)
class LeastOfTheLength(Encoder):
    def change(self, x):
        return x * min(x.shape[1], 50) / 50


@suspect(LONG, thorough=True)
class GreatestOfTheLength(Encoder):
    def change(self, x):
        return x * max(1.0, x.shape[1] / 50)


@suspect(LONG, thorough=True)
class RootOfTheLength(Encoder):
    def change(self, x):
        return x * min(1.0, math.sqrt(64 / x.shape[1]))


@suspect(LONG, thorough=True)
class BeyondALength(Encoder):
    def change(self, x):
        return x * 2 if x.shape[1] > 50 else x


@suspect(LONG, thorough=True)
class BeyondAFarLength(Encoder):
    def change(self, x):
        return x * 2 if x.shape[1] > 450 else x


@suspect(LONG)
class AtOneLength(Encoder):
    def change(self, x):
        return x * 2 if x.shape[1] == 64 else x


@suspect(LONG)
class LengthsThatDivide(Encoder):
    def change(self, x):
        return x * 2 if x.shape[1] % 20 == 0 else x


@suspect(LONG)
class BitsOfTheLength(Encoder):
    def change(self, x):
        return x * int(x.shape[1]).bit_length()


@suspect(LONG, thorough=True)
class TableOfLengths(Encoder):
    def change(self, x):
        return x * [1.0, 2.0, 3.0][min(x.shape[1] // 30, 2)]


@suspect(LONG)
class ClampedLengthTensor(Encoder):
    def change(self, x):
        return x * torch.tensor(x.shape[1]).clamp(max=50) / 50


@suspect(LONG)
class ClampedPositions(Encoder):
    def change(self, x):
        return x + torch.arange(x.shape[1]).clamp(max=45)[:, None] / 45


@suspect(LONG)
class AngleOfLongRows(Encoder):
    """Rotary positions whose base grows with a row beyond 48 positions, as by dynamic NTK."""

    def change(self, x):
        base = 100.0 * (x.shape[1] / 48) ** 1.2 if x.shape[1] > 48 else 100.0
        rates = base ** -torch.arange(0, 1, 2 / x.shape[2])
        angle = torch.arange(x.shape[1])[:, None] * rates
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@suspect(LONG, thorough=True)
class BlocksOfSixteen(Encoder):
    def change(self, x):
        missing = -x.shape[1] % 16
        blocks = torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, 16))
        return (blocks - blocks.mean(2, keepdim=True)).flatten(1, 2)[:, : x.shape[1]]


@suspect(LONG, thorough=True)
class FirstFifty(Encoder):
    def change(self, x):
        return x + x[:, :50].mean(1, keepdim=True)


@suspect(LONG)
class RoundedRoot(Encoder):
    def change(self, x):
        return x * int(math.sqrt(x.shape[1]))


@suspect(LONG)
class Resampled(Encoder):
    def change(self, x):
        half = torch.nn.functional.interpolate(x.transpose(1, 2), size=32, mode="linear")
        return torch.nn.functional.interpolate(half, size=x.shape[1], mode="linear").transpose(1, 2)


class _Scaled(Decoder):
    FROM = 0

    def places(self, ids):
        return torch.arange(ids.shape[1]) % 64

    def change(self, x, ids):
        return x * (2 if ids.shape[1] > self.FROM else 1)


@suspect([ids(9), ids(70), ids(150)], {"max_length": 200}, thorough=True)
class DecoderBeyondALength(_Scaled):
    FROM = 100


@suspect([ids(9), ids(1500)], {"max_length": 2000}, thorough=True)
class DecoderBeyondTheComparedLength(_Scaled):
    FROM = 1200


@suspect([ids(9), ids(1500)], {"max_length": 2000})
class TableThatBendsBeyondTheComparedLength(Decoder):
    """Positions whose rates change from 1,200 positions on, as in rotary scaling by the length of the sequence."""

    def places(self, ids):
        return torch.arange(ids.shape[1]) % 64

    def change(self, x, ids):
        rate = 1.0 if ids.shape[1] <= 1200 else 1200 / ids.shape[1]
        angle = torch.arange(ids.shape[1])[:, None] * rate * 0.01 ** torch.arange(0, 1, 1 / x.shape[2])
        return x + angle.sin()


@suspect([ids(9), ids(1500)], {"max_length": 2000})
class PositionsThatBend(Decoder):
    """Positions that are clamped at 1,200: a table that is right at every length."""

    def places(self, ids):
        return torch.arange(ids.shape[1]).clamp(max=1200) % 64
