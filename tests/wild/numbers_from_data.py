"""Models whose Python code reads their data: harmless reads export, reads that choose a path are refused."""

from __future__ import annotations

import torch
from support.handwritten_case import Case
from tiny import TinyDecoder


class Asserted(TinyDecoder):
    def mask(self, idx):
        assert (idx >= 0).all()
        return super().mask(idx)

    def feed_forward(self, x):
        if torch.isnan(x).any():
            raise ValueError("the activations are not numbers")
        return super().feed_forward(x)


class Reported(TinyDecoder):
    def feed_forward(self, x):
        self.report = f"mean {x.mean().item():.3f}"
        return super().feed_forward(x)


class SignByLargestId(TinyDecoder):
    """Of random ids one is greater than 3, nearly always: the other path would go unseen."""

    def feed_forward(self, x):
        return super().feed_forward(x) * self.sign

    def mask(self, idx):
        self.sign = 1 if int(idx.max()) > 3 else -1
        return super().mask(idx)


class LengthOfText(TinyDecoder):
    def feed_forward(self, x):
        return super().feed_forward(x) * len(f"{x.sum().item():.0f}")


class NumbersInATensor(TinyDecoder):
    """Sizes that do not vary go through a tensor, of which Python reads them."""

    def feed_forward(self, x):
        width, parts = torch.tensor([x.shape[-1], 3]) // torch.tensor([3, 1])
        order = torch.arange(width) + torch.arange(parts)[:, None] * width
        return super().feed_forward(x)[..., order.flip(0).flatten()]


CASES = [
    Case("numbers-in-a-tensor", NumbersInATensor),
    Case("asserted", Asserted, exports_file=True),
    Case("reported", Reported),
    Case("sign-by-id", SignByLargestId, refusal="reads a number out of its data into Python"),
    Case("length-of-text", LengthOfText, refusal="torch.export cannot trace it"),
]
