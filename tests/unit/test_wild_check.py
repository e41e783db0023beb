"""The check of public packages: a file is equal to its module, and a file of other weights is reported as different."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from wild_packages.check import DIFFERS, EQUAL, DullError, check
from wild_packages.entry import VOCABULARY, Entry, ids, numbers

from tformer_export import export

WIDTH = 16


class Decoder(nn.Module):
    """Attention over the positions before, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.embed(x)
        q, k, v = self.qkv(states).chunk(3, -1)
        return self.head(states + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Repeating(Decoder):
    """Gives the same token at each position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1000 * torch.eye(VOCABULARY)[7]


class Frames(nn.Module):
    """(batch, channels, frames) → (batch, frames, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(8, WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.convolution(x).transpose(1, 2)
        return self.head(states + nn.functional.scaled_dot_product_attention(states, states, states))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.patches(x).relu().flatten(2).mean(2))


ENTRIES = [
    Entry("none", "Decoder", Decoder, {"x": ids()}, "x"),
    Entry("none", "Frames", Frames, {"x": numbers(8, None)}),
    Entry("none", "Image", Image, {"x": numbers(3, 8, 8)}, told={"axes": {"x": (0,)}}),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.model)
def test_equal_file_is_equal_and_file_of_other_weights_differs(entry: Entry, tmp_path) -> None:
    path = tmp_path / "model.onnx"
    export(entry.make(), path, **entry.arguments())
    assert check(entry, entry.make(), path).outcome == EQUAL
    other = entry.make()
    with torch.no_grad():
        other.head.bias += 0.05 * torch.arange(len(other.head.bias))
    verdict = check(entry, other, path)
    assert verdict.outcome == DIFFERS
    assert verdict.figures


def test_equal_results_that_would_prove_nothing_are_an_error(tmp_path) -> None:
    entry = dataclasses.replace(ENTRIES[0], build=Repeating)
    export(entry.make(), tmp_path / "model.onnx", **entry.arguments())
    with pytest.raises(DullError, match="do not vary"):
        check(entry, entry.make(), tmp_path / "model.onnx")
