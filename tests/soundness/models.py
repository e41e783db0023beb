"""The models that the catalogue changes: a small decoder and a small encoder, whose numbers are of the size of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LONGEST = 50, 24, 3, 64
RARE = 47  # an id that a drawn example does not have
ROW = 12  # positions of an example


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """x: (batch, time, width). hidden: true where a key is hidden, to be broadcast to (batch, 1, time, time)."""
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """ids (batch, time) → logits (batch, time, vocabulary). A model of the catalogue overrides a part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.shape[1])

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)

    def change(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return other states (batch, time, width)."""
        return x

    def finish(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return other logits."""
        return logits

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(self.places(ids))
        x = self.change(x, ids)
        x = x + self.attention(self.norm(x), self.hidden(ids))
        return self.finish(self.head(x), ids)


class Encoder(nn.Module):
    """Numbers (batch, time, width) → numbers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.change(x)
        return self.head(y + self.attention(self.norm(y)))


@dataclass(frozen=True)
class Suspect:
    """A model that is wrong on purpose: an export must refuse it, or its file must equal it on these batches.

    build: the class. step: whether it is decoded.
    batches: of inputs that show the difference, each a list of rows: ids of any lengths, or numbers (time, width).
    told: further arguments of `export`.
    thorough: whether the suite leaves it out, because it has others of its kind.
    """

    build: type[nn.Module]
    batches: list[list[torch.Tensor]]
    told: Mapping[str, Any] = field(default_factory=dict)
    thorough: bool = False

    @property
    def step(self) -> bool:
        return issubclass(self.build, Decoder)


CATALOGUE: dict[str, Suspect] = {}


def suspect(batches: list[list[torch.Tensor]], told: Mapping[str, Any] | None = None, thorough: bool = False) -> Any:
    """Add the class below to the catalogue."""

    def add(build: type[nn.Module]) -> type[nn.Module]:
        CATALOGUE[build.__name__] = Suspect(build, batches, told or {}, thorough)
        return build

    return add


def ids(*rows: int, seed: int = 3, rare_at: int | None = None) -> list[torch.Tensor]:
    """Return rows of these lengths without the rare id; with it at one place of the first row if a place is given."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, RARE, (length,), generator=generator) for length in rows]
    if rare_at is not None:
        drawn[0][rare_at] = RARE
    return drawn


def numbers(*rows: int, seed: int = 3, factor: float = 1.0) -> list[torch.Tensor]:
    """Return rows of normal numbers. factor: of the first row."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(length, WIDTH, generator=generator) for length in rows]
    drawn[0] = drawn[0] * factor
    return drawn
