"""Decoders in which a later position changes an earlier one, by values that a drawn example does not have."""

from __future__ import annotations

import torch

from soundness.models import RARE, Decoder, ids, suspect

RARE_LATER = [ids(9, rare_at=6), ids(9, 4, rare_at=8)]
PLAIN = [ids(9), ids(3, 12)]


@suspect(RARE_LATER)
class RareIdInTheRow(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).any(1)[:, None, None]


@suspect(RARE_LATER, thorough=True)
class NextOfRareIds(Decoder):
    def change(self, x, ids):
        return torch.where((ids.roll(-1, 1) == RARE)[..., None], x.roll(-1, 1), x)


@suspect(RARE_LATER)
class EndOfTheRow(Decoder):
    def change(self, x, ids):
        return torch.where((ids[:, -1:] == RARE)[..., None], x * 2, x)


@suspect(RARE_LATER, thorough=True)
class ReadsAllForRareIds(Decoder):
    def hidden(self, ids):
        return super().hidden(ids) & ~(ids == RARE)[:, None, :, None]


@suspect(RARE_LATER)
class RareKeysAreSeenByAll(Decoder):
    def hidden(self, ids):
        return super().hidden(ids) & ~(ids == RARE)[:, None, None, :]


@suspect(RARE_LATER)
class CountsRareIdsToCome(Decoder):
    def change(self, x, ids):
        return x + (ids == RARE).float().flip(1).cumsum(1).flip(1)[..., None]


@suspect(RARE_LATER)
class GreatestIdOfTheRow(Decoder):
    def change(self, x, ids):
        return x * torch.where(ids.amax(1) >= RARE, 2.0, 1.0)[:, None, None]


@suspect(RARE_LATER)
class PositionsFromTheEndForRareIds(Decoder):
    def places(self, ids):
        forwards = torch.arange(ids.shape[1])
        return torch.where((ids == RARE).any(1, keepdim=True), forwards.flip(0), forwards)


@suspect(PLAIN)
class MeanOfTheRow(Decoder):
    def change(self, x, ids):
        return x + x.mean(1, keepdim=True)


@suspect(PLAIN)
class LoudRows(Decoder):
    """Divides a row by its greatest number. The number of a drawn row is below the least divisor."""

    def change(self, x, ids):
        return x / x.abs().amax((1, 2), keepdim=True).clamp(min=4.5)


@suspect(PLAIN)
class ShareOfTheLength(Decoder):
    def change(self, x, ids):
        return x * ids.shape[1] / 50


@suspect([ids(9), ids(60), ids(3, 55)], thorough=True)
class ShareOfTheLengthUpToSome(Decoder):
    def change(self, x, ids):
        return x * min(ids.shape[1], 50) / 50


@suspect([ids(9), ids(60), ids(3, 55)])
class LongerThanSome(Decoder):
    def change(self, x, ids):
        return x * max(1.0, ids.shape[1] / 40)


@suspect(PLAIN)
class SortedIds(Decoder):
    def change(self, x, ids):
        return x + self.tokens(ids.sort(1).values)


@suspect(PLAIN)
class LookAheadOfOne(Decoder):
    def change(self, x, ids):
        return x + 0.01 * torch.nn.functional.pad(x, (0, 0, 0, 1))[:, 1:]
