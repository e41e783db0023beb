"""An encoder-decoder Transformer, as in "Attention Is All You Need" (Vaswani et al., 2017), in plain PyTorch.

Shapes are written with B = batch, S = source time, T = target time, D = width, H = heads, V = vocabulary.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any
from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS = ("sinusoidal", "learned")
NORMS = ("post", "pre")
ACTIVATIONS = ("relu", "gelu")


class MultiHeadAttention(nn.Module):
    """Attention(Q, K, V) = softmax(Q Kᵀ / √(D / H)) V in each of H heads, which are joined and projected (§3.2)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared by {heads} heads")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D), memory (B, S, D) → (B, T, D). mask, broadcast to (B, H, T, S), is true where x may look."""
        query = self._split(self.query(x))
        key = self._split(self.key(memory))
        value = self._split(self.value(memory))
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])  # (B, H, T, S)
        # The lowest finite number, not -inf: a row that is all padding must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        heads = torch.matmul(weights, value)  # (B, H, T, D / H)
        return self.output(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, H, T, D / H)"""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """FFN(x) = W₂ f(W₁ x + b₁) + b₂ at each position, with f = relu or gelu (§3.3)."""

    def __init__(self, width: int, hidden: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.activation = F.relu if activation == "relu" else F.gelu
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        return self.contract(self.dropout(self.activation(self.expand(x))))


class Residual(nn.Module):
    """A sublayer f and the way around it: LayerNorm(x + f(x)) if `norm` is post, x + f(LayerNorm(x)) if it is pre."""

    def __init__(self, width: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, norm: str, activation: str) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(width, heads, dropout)
        self.feedforward = FeedForward(width, hidden, activation, dropout)
        self.residuals = nn.ModuleList(Residual(width, norm, dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, S, D), mask (B, 1, 1, S) → (B, S, D)"""
        attend, transform = self.residuals
        x = attend(x, lambda y: self.self_attention(y, y, mask))
        return transform(x, self.feedforward)


class DecoderLayer(nn.Module):
    """Self-attention over what is written so far, attention to the source, then feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, norm: str, activation: str) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(width, heads, dropout)
        self.cross_attention = MultiHeadAttention(width, heads, dropout)
        self.feedforward = FeedForward(width, hidden, activation, dropout)
        self.residuals = nn.ModuleList(Residual(width, norm, dropout) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """x (B, T, D), mask (B, 1, T, T), memory (B, S, D), memory_mask (B, 1, 1, S) → (B, T, D)"""
        attend, consult, transform = self.residuals
        x = attend(x, lambda y: self.self_attention(y, y, mask))
        x = consult(x, lambda y: self.cross_attention(y, memory, memory_mask))
        return transform(x, self.feedforward)


class Embedding(nn.Module):
    """√D · token embedding + position, with dropout (§3.4, §3.5)."""

    positions: Tensor

    def __init__(self, vocabulary: int, width: int, max_length: int, positions: str, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        # So that a token has unit variance after the factor √D, and a tied output projection starts with small logits.
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(max_length, width) * 0.02)
        else:
            self.register_buffer("positions", sinusoids(max_length, width), persistent=False)
        self.scale = math.sqrt(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → (B, T, D)"""
        return self.dropout(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i + 1) = cos(p / 10000^(2i/D)): (length, width), §3.5."""
    position = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate[: width // 2])
    return table


class Seq2SeqTransformer(nn.Module):
    """Translates one sequence of ids into another: p(tgt[t + 1] | tgt[..t], src) = softmax(forward(src, tgt)[:, t]).

    Every argument is a number or a word, so a model can be described in JSON. `source_pad` and `target_pad` are the
    ids of padding, which is never looked at and stands at the end of a row. Sequences hold at most `max_length` ids.
    `tie_output` uses the target embedding as the output projection (§3.4), which then has a bias of its own only.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        *,
        width: int = 512,
        heads: int = 8,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        feedforward: int = 2048,
        dropout: float = 0.1,
        max_length: int = 512,
        positions: str = "sinusoidal",
        norm: str = "post",
        activation: str = "relu",
        tie_output: bool = True,
        source_pad: int = 0,
        target_pad: int = 0,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("positions", positions, POSITIONS),
            ("norm", norm, NORMS),
            ("activation", activation, ACTIVATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        self.source_pad = source_pad
        self.target_pad = target_pad
        self.max_length = max_length
        self.source = Embedding(source_vocabulary, width, max_length, positions, dropout)
        self.target = Embedding(target_vocabulary, width, max_length, positions, dropout)
        layer = (width, heads, feedforward, dropout, norm, activation)
        self.encoder = nn.ModuleList(EncoderLayer(*layer) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*layer) for _ in range(decoder_layers))
        # With norms before the sublayers the stream itself is never normalised, so it is at the end.
        self.encoder_norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.output = nn.Linear(width, target_vocabulary)
        for weight in (w for layers in (self.encoder, self.decoder) for w in layers.parameters() if w.dim() > 1):
            nn.init.xavier_uniform_(weight)
        if tie_output:
            self.output.weight = self.target.tokens.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """src (B, S), tgt (B, T) → logits (B, T, V); logits at t see tgt[: t + 1] and all of src."""
        source_mask = self.source_mask(src)
        return self.decode(tgt, self.encode(src, source_mask), source_mask)

    def source_mask(self, src: Tensor) -> Tensor:
        """(B, S) → (B, 1, 1, S), true where there is a token."""
        return (src != self.source_pad)[:, None, None, :]

    def target_mask(self, tgt: Tensor) -> Tensor:
        """(B, T) → (B, 1, T, T), true where the key is a token and not later than the query."""
        time = tgt.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool, device=tgt.device).tril()
        return (tgt != self.target_pad)[:, None, None, :] & causal

    def encode(self, src: Tensor, source_mask: Tensor) -> Tensor:
        """src (B, S) → memory (B, S, D)"""
        x = self.source(src)
        for layer in self.encoder:
            x = layer(x, source_mask)
        return self.encoder_norm(x)

    def decode(self, tgt: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """tgt (B, T), memory (B, S, D) → logits (B, T, V)"""
        mask = self.target_mask(tgt)
        x = self.target(tgt)
        for layer in self.decoder:
            x = layer(x, mask, memory, source_mask)
        return self.output(self.decoder_norm(x))
