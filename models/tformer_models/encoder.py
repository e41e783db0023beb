"""A sentence encoder and a text classifier in plain PyTorch, and the layers that they share with the language model.

Shapes use B = batch, T = time, D = width, H = heads, V = vocabulary.
"""

# Calling a module returns Any.
# mypy: no-warn-return-any
from __future__ import annotations

import math
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_models.seq2seq import Embedding, FeedForward, Residual, check_choice

POOLINGS = ("first", "mean", "max")


class SelfAttention(nn.Module):
    """Multi-head self-attention with one projection (3 D, D) for queries, keys and values.

    Raises ValueError if `width` is not a multiple of `heads`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend within x (B, T, D); return (B, T, D).

        mask: bool, broadcast to (B, H, T, T); true where a query may attend to a key.
        """
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)  # (B, H, T, T)
        # The lowest finite number instead of -inf: softmax of a row with padding alone must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        heads = self.dropout(scores.softmax(-1)) @ value
        return self.output(heads.transpose(1, 2).flatten(2))


class PreNormLayer(nn.Module):
    """Self-attention, then feed-forward with gelu, each with a norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.feedforward = FeedForward(width, hidden, "gelu", dropout)
        self.residuals = nn.ModuleList(Residual(width, "pre", dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Transform x (B, T, D), with the mask of `SelfAttention`; return (B, T, D)."""
        attention_residual, feedforward_residual = self.residuals
        x = attention_residual(x, lambda y: self.attention(y, mask))
        return feedforward_residual(x, self.feedforward)


class StackSizes(TypedDict, total=False):
    """The keyword arguments of `PreNormStack` but for dropout."""

    width: int
    heads: int
    layers: int
    feedforward: int
    max_length: int
    positions: str


class StackOptions(StackSizes, total=False):
    """The keyword arguments of `PreNormStack`."""

    dropout: float


class EncoderOptions(StackSizes, total=False):
    """The keyword arguments of `SentenceEncoder` but for dropout."""

    pool: str
    vector: int | None
    normalize: bool
    pad: int


class PreNormStack(nn.Module):
    """Token and position embedding, `layers` pre-norm layers and a final norm."""

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
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, max_length, positions, dropout)
        self.layers = nn.ModuleList(PreNormLayer(width, heads, feedforward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.width, self.max_length = width, max_length

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) of ids (B, T), with the mask of `SelfAttention`."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


def pool_states(states: Tensor, token_mask: Tensor, pool: str) -> Tensor:
    """Pool states (B, T, D) over time; return (B, D).

    token_mask: bool (B, T), true at tokens; padding is left out.
    pool: "first" (the state of the first token), "mean" or "max" (element-wise).
    """
    if pool == "first":
        return states[:, 0]
    if pool == "max":
        return states.masked_fill(~token_mask[:, :, None], torch.finfo(states.dtype).min).amax(1)
    weights = token_mask[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


class SentenceEncoder(nn.Module):
    """Encode each row of ids as one vector: the pooled hidden states, optionally projected and normalised.

    pool: one of POOLINGS; ValueError otherwise.
    vector: size of the vector after a linear projection; None for no projection and a vector of `width` numbers.
    normalize: scale each vector to length 1.
    pad: padding id, which is masked. Every row needs at least one token.
    stack: the keyword arguments of `PreNormStack`.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        pool: str = "mean",
        vector: int | None = None,
        normalize: bool = False,
        pad: int = 0,
        **stack: Unpack[StackOptions],
    ) -> None:
        super().__init__()
        check_choice("pool", pool, POOLINGS)
        self.pad, self.pool, self.normalize = pad, pool, normalize
        self.states = PreNormStack(vocabulary, **stack)
        self.max_length = self.states.max_length
        self.project = nn.Identity() if vector is None else nn.Linear(self.states.width, vector)
        self.width = vector or self.states.width

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, D), or (B, vector), of ids (B, T)."""
        token_mask = ids != self.pad
        states = self.states(ids, token_mask[:, None, None, :])
        vectors = self.project(pool_states(states, token_mask, self.pool))
        return F.normalize(vectors, dim=-1) if self.normalize else vectors


class SentenceClassifier(nn.Module):
    """A sentence encoder, dropout and a linear layer with one score per label.

    labels: number of labels. options: passed to `SentenceEncoder`.
    """

    def __init__(
        self, vocabulary: int, labels: int, *, dropout: float = 0.1, **options: Unpack[EncoderOptions]
    ) -> None:
        super().__init__()
        self.encoder = SentenceEncoder(vocabulary, dropout=dropout, **options)
        self.max_length = self.encoder.max_length
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(self.encoder.width, labels)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores (B, labels) of ids (B, T)."""
        return self.output(self.dropout(self.encoder(ids)))
