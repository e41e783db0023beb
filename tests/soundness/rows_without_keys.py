"""Positions that see no key, for rare ids or numbers: torch gives zeros, NaN or a mean of values, by its kernel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from soundness.models import HEADS, RARE, WIDTH, Attention, Decoder, Encoder, ids, numbers, suspect

RARE_ROWS = [ids(9, rare_at=3), ids(9, rare_at=0), ids(5, 11, rare_at=1), ids(6, rare_at=5)]
RARE_NUMBERS = [numbers(9, factor=3.0), numbers(5, 5, factor=4.0)]
LARGE = 4.0  # a number that normal ones hardly ever reach


class FusedAttention(Attention):
    """Attention by torch's own function. mask: what hides keys."""

    def mask(self, hidden: torch.Tensor) -> torch.Tensor:
        return ~hidden

    def forward(self, x, hidden=None):
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mask = None if hidden is None else self.mask(hidden)
        attended = functional.scaled_dot_product_attention(*parts.unbind(0), attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class _ByNumber(FusedAttention):
    number = -torch.inf

    def mask(self, hidden):
        return torch.zeros(hidden.shape).masked_fill(hidden, self.number)


class _ByLowest(_ByNumber):
    number = torch.finfo(torch.float32).min


class _ByBillion(_ByNumber):
    number = -1e9


class _ByHand(Attention):
    """As models did before torch had a function: a large negative number in the place of scores."""

    def forward(self, x, hidden=None):
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, torch.finfo(torch.float32).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Blind(Decoder):
    """A position with the rare id sees no key."""

    attends: type[nn.Module] = FusedAttention

    def __init__(self):
        super().__init__()
        self.attention = self.attends()

    def hidden(self, ids):
        return super().hidden(ids) | (ids == RARE)[:, None, :, None]


@suspect(RARE_ROWS)
class SeesNoKey(_Blind):
    pass


@suspect(RARE_ROWS, thorough=True)
class SeesNoKeyByInfinity(_Blind):
    attends = _ByNumber


@suspect(RARE_ROWS, thorough=True)
class SeesNoKeyByTheLowestNumber(_Blind):
    attends = _ByLowest


@suspect(RARE_ROWS, thorough=True)
class SeesNoKeyByAMinusBillion(_Blind):
    attends = _ByBillion


@suspect(RARE_ROWS)
class SeesNoKeyByHand(_Blind):
    attends = _ByHand


class _HiddenKeys(_Blind):
    """The rare id is hidden from all positions, as padding is: a row that begins with it has a position without key."""

    def hidden(self, ids):
        return Decoder.hidden(self, ids) | (ids == RARE)[:, None, None, :]


@suspect(RARE_ROWS)
class HidesTheFirstKey(_HiddenKeys):
    pass


@suspect(RARE_ROWS, thorough=True)
class HidesTheFirstKeyByInfinity(_HiddenKeys):
    attends = _ByNumber


@suspect(RARE_ROWS, thorough=True)
class HidesTheFirstKeyByTheLowestNumber(_HiddenKeys):
    attends = _ByLowest


@suspect(RARE_ROWS, thorough=True)
class HidesTheFirstKeyByHand(_HiddenKeys):
    attends = _ByHand


PAD = {"special_tokens": {"pad_token_id": RARE, "bos_token_id": 1, "eos_token_id": 2}, "max_length": 64}


@suspect(RARE_ROWS, PAD)
class BeginsWithPadding(_HiddenKeys):
    pass


@suspect(RARE_ROWS, PAD, thorough=True)
class BeginsWithPaddingByTheLowestNumber(_HiddenKeys):
    attends = _ByLowest


class _BlindEncoder(Encoder):
    """A position whose first number is large sees no key."""

    attends: type[nn.Module] = FusedAttention

    def __init__(self):
        super().__init__()
        self.attention = self.attends()

    def hidden(self, x):
        return (x[..., 0] > LARGE)[:, None, :, None].expand(-1, 1, -1, x.shape[1])

    def forward(self, x):
        return self.head(x + self.attention(self.norm(x), self.hidden(x)))


@suspect(RARE_NUMBERS)
class NumberSeesNoKey(_BlindEncoder):
    pass


@suspect(RARE_NUMBERS, thorough=True)
class NumberSeesNoKeyByInfinity(_BlindEncoder):
    attends = _ByNumber


@suspect(RARE_NUMBERS, thorough=True)
class NumberSeesNoKeyByTheLowestNumber(_BlindEncoder):
    attends = _ByLowest


@suspect(RARE_NUMBERS, thorough=True)
class NumberSeesNoKeyByHand(_BlindEncoder):
    attends = _ByHand


class _AllHidden(_BlindEncoder):
    """All keys of a row are hidden if its numbers are large, as those of a row of padding are."""

    def hidden(self, x):
        large = x.abs().mean((1, 2)) > LARGE / 2
        return large[:, None, None, None].expand(-1, 1, x.shape[1], x.shape[1])


@suspect(RARE_NUMBERS, thorough=True)
class RowIsPaddingByTheLowestNumber(_AllHidden):
    attends = _ByLowest


@suspect(RARE_NUMBERS, thorough=True)
class RowIsPaddingByHand(_AllHidden):
    attends = _ByHand


class _MultiHead(nn.Module):
    """The attention of torch's own layer, whose mask is true where a key is hidden."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, hidden=None):
        hidden = hidden.expand(x.shape[0], HEADS, x.shape[1], x.shape[1]).flatten(0, 1)
        return self.layer(x, x, x, attn_mask=hidden, need_weights=False)[0]


@suspect(RARE_ROWS)
class LayerSeesNoKey(_Blind):
    attends = _MultiHead


@suspect(RARE_NUMBERS)
class RowIsPadding(_AllHidden):
    pass


@suspect(RARE_NUMBERS)
class RowIsPaddingByInfinity(_AllHidden):
    attends = _ByNumber


@suspect(RARE_NUMBERS)
class RowIsPaddingOfALayer(_AllHidden):
    attends = _MultiHead


@suspect(RARE_NUMBERS)
class GreatestOfHiddenKeys(_AllHidden):
    """Zeros of a row without keys, and what `amax` and `sign` make of them."""

    def forward(self, x):
        y = self.attention(self.norm(x), self.hidden(x))
        return self.head(x + y.amax(-1, keepdim=True) + y.sign())


@suspect(RARE_NUMBERS)
class SignOfHiddenKeysByHand(Encoder):
    """NaN of a row without keys, and what `amax` and `sign` make of it."""

    def forward(self, x):
        large = x.abs().mean((1, 2)) > LARGE / 2
        y = self.attention(self.norm(x), large[:, None, None, None])
        return self.head(x + y.sign().nan_to_num(3.0) + y.amax(-1, keepdim=True).nan_to_num(5.0))
