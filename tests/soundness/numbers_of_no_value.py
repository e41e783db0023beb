"""Padding inside rows, NaN, rows whose keys are all hidden, and logits that hold no number."""

from __future__ import annotations

import torch

from soundness.models import RARE, VOCABULARY, WIDTH, Decoder, Encoder, ids, numbers, suspect

PAD = {"special_tokens": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, "max_length": 64}
PADDED_INSIDE = [[torch.tensor([1, 5, 0, 7, 9])], [torch.tensor([1, 0, 0, 7]), torch.tensor([1, 4])]]
RARE_ROWS = [ids(9, rare_at=3), ids(5, 11, rare_at=1)]


@suspect(PADDED_INSIDE, PAD)
class PositionsOfContent(Decoder):
    def places(self, ids):
        return ((ids != 0).cumsum(1) - 1).clamp(min=0)

    def hidden(self, ids):
        return super().hidden(ids) | (ids == 0)[:, None, None, :]


@suspect(PADDED_INSIDE, PAD)
class HidesPadding(Decoder):
    def hidden(self, ids):
        hides = super().hidden(ids) | (ids == 0)[:, None, None, :]
        return hides & ~torch.eye(ids.shape[1], dtype=torch.bool)


@suspect(PADDED_INSIDE, PAD)
class PaddingIsAToken(Decoder):
    pass


@suspect(RARE_ROWS)
class NothingDividedByNothing(Decoder):
    def finish(self, logits, ids):
        return logits + (0.0 / (ids != RARE).float())[..., None]


@suspect(RARE_ROWS)
class RootOfNegativeNumbers(Decoder):
    def change(self, x, ids):
        return x + ((RARE - 0.5) - ids).sqrt()[..., None]


@suspect(RARE_ROWS)
class EmbeddingWithoutNumbers(Decoder):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.tokens.weight[RARE] = torch.nan


@suspect(RARE_ROWS)
class HidesAllKeys(Decoder):
    """A position with the rare id sees no key: softmax gives NaN."""

    def hidden(self, ids):
        return super().hidden(ids) | (ids == RARE)[:, None, :, None]


@suspect(RARE_ROWS, thorough=True)
class HidesAllKeysAndRepairs(Decoder):
    def hidden(self, ids):
        return super().hidden(ids) | (ids == RARE)[:, None, :, None]

    def finish(self, logits, ids):
        return logits.nan_to_num(0.0)


@suspect(RARE_ROWS)
class InfiniteLogits(Decoder):
    def finish(self, logits, ids):
        return logits.masked_fill((ids == RARE)[..., None], -torch.inf)


@suspect(RARE_ROWS)
class OneLogitWithoutNumber(Decoder):
    def finish(self, logits, ids):
        return logits.masked_fill((ids == RARE)[..., None] & (torch.arange(VOCABULARY) == 9), torch.nan)


@suspect([numbers(9), numbers(5, 5)])
class SignOfNothing(Encoder):
    def change(self, x):
        nothing = (x * 0) / 0
        return torch.where(nothing.sign() == 0, x * 2, x)


@suspect([numbers(9), numbers(5, 5)])
class GreatestOfNothing(Encoder):
    def change(self, x):
        holes = torch.where(x > 2, torch.nan, x)
        return x + holes.amax(-1, keepdim=True).nan_to_num(7.0)


@suspect([numbers(9, factor=1e25), numbers(5, 5, factor=1e30)])
class Overflows(Encoder):
    def change(self, x):
        return x / (x * x).mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


@suspect([numbers(9, factor=1e-25)])
class Underflows(Encoder):
    def change(self, x):
        return x / (x * x).mean(-1, keepdim=True).sqrt()


@suspect([numbers(9), numbers(4, 4)])
class TiesOfEqualNumbers(Encoder):
    """The first of equal numbers."""

    def change(self, x):
        steps = x.round().clamp(-1, 1)
        return x + torch.nn.functional.one_hot(steps.argmax(-1), WIDTH)


@suspect([numbers(9), numbers(4, 4)])
class HalvesAreRoundedToEven(Encoder):
    def change(self, x):
        return x + (x.sign() * 2.5).round()


@suspect([numbers(9), numbers(4, 4)])
class RemaindersOfNegativeNumbers(Encoder):
    def change(self, x):
        return x + (x.round().long() % 3) + torch.fmod(x.round(), 3) + x.round().long() // 2
