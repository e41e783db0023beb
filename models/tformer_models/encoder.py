"""A sentence encoder and a classifier in plain PyTorch, and the layers that they share with the language model.

Shapes are written with B = batch, T = time, D = width, H = heads, V = vocabulary.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_models.seq2seq import Embedding, FeedForward, Residual

POOLS = ("first", "mean", "max")


class SelfAttention(nn.Module):
    """Attention of a sequence to itself in H heads, its queries, keys and values from one matrix (3 D, D)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared by {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D). mask, broadcast to (B, H, T, T), is true where a query may look."""
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)  # (B, H, T, T)
        # The lowest finite number, not -inf: a row that is all padding must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        heads = self.dropout(scores.softmax(-1)) @ value
        return self.output(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, then feed-forward, each after a norm and with a way around it."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.feedforward = FeedForward(width, hidden, "gelu", dropout)
        self.residuals = nn.ModuleList(Residual(width, "pre", dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D), mask as of `SelfAttention` → (B, T, D)"""
        attend, transform = self.residuals
        x = attend(x, lambda y: self.attention(y, mask))
        return transform(x, self.feedforward)


class Layers(nn.Module):
    """Ids → states: embedding with positions, layers, and a last norm."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        heads: int,
        layers: int,
        feedforward: int,
        dropout: float,
        max_length: int,
        positions: str,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, max_length, positions, dropout)
        self.layers = nn.ModuleList(Layer(width, heads, feedforward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids (B, T), mask as of `SelfAttention` → (B, T, D)"""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


def pool_rows(states: Tensor, real: Tensor, pool: str) -> Tensor:
    """states (B, T, D), real (B, T), true where there is a token → (B, D): the first state, their mean, or of each
    number the greatest. Padding has no part in it."""
    if pool == "first":
        return states[:, 0]
    if pool == "max":
        return states.masked_fill(~real[:, :, None], torch.finfo(states.dtype).min).amax(1)
    weights = real[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


class SentenceEncoder(nn.Module):
    """A vector for each row of ids: its states pooled, projected to `vector` numbers if that is given, and of length 1
    if `normalize` is set. `pad` is the id of padding, which is never looked at; every row has a token that is none."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        feedforward: int = 512,
        dropout: float = 0.1,
        max_length: int = 128,
        positions: str = "learned",
        pool: str = "mean",
        vector: int | None = None,
        normalize: bool = False,
        pad: int = 0,
    ) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, not {pool!r}")
        self.pad, self.pool, self.normalize = pad, pool, normalize
        self.max_length = max_length
        self.states = Layers(
            vocabulary,
            width=width,
            heads=heads,
            layers=layers,
            feedforward=feedforward,
            dropout=dropout,
            max_length=max_length,
            positions=positions,
        )
        self.project = nn.Identity() if vector is None else nn.Linear(width, vector)
        self.width = vector or width

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → (B, D), or (B, vector)"""
        real = ids != self.pad
        vectors = self.project(pool_rows(self.states(ids, real[:, None, None, :]), real, self.pool))
        return F.normalize(vectors, dim=-1) if self.normalize else vectors


class SentenceClassifier(nn.Module):
    """A sentence encoder and a linear layer: a score for each of `labels`. options: of the `SentenceEncoder`."""

    def __init__(self, vocabulary: int, labels: int, *, dropout: float = 0.1, **options: object) -> None:
        super().__init__()
        self.encoder = SentenceEncoder(vocabulary, dropout=dropout, **options)  # type: ignore[arg-type]
        self.max_length = self.encoder.max_length
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(self.encoder.width, labels)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → scores (B, labels)"""
        return self.output(self.dropout(self.encoder(ids)))
