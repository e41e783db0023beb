"""An encoder-decoder Transformer in plain PyTorch, after "Attention Is All You Need" (Vaswani et al., 2017).

Section numbers (§) in this module refer to that paper. Shapes use B = batch, S = source time, T = target time,
D = width, H = heads, V = vocabulary.
"""

# Calling a module returns Any.
# mypy: no-warn-return-any
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS = ("sinusoidal", "learned")
NORMS = ("post", "pre")
ACTIVATIONS = ("relu", "gelu")


@dataclass(frozen=True)
class LayerConfig:
    """Hyperparameters of an encoder or decoder layer; the defaults are those of the paper's base model.

    feedforward: the hidden width of the feed-forward layer.
    norm, activation: one of NORMS, ACTIVATIONS; ValueError otherwise.
    """

    width: int = 512
    heads: int = 8
    feedforward: int = 2048
    dropout: float = 0.1
    norm: str = "post"
    activation: str = "relu"

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)


class LayerOptions(TypedDict, total=False):
    """The fields of `LayerConfig` as keyword arguments."""

    width: int
    heads: int
    feedforward: int
    dropout: float
    norm: str
    activation: str


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if a hyperparameter is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


class MultiHeadAttention(nn.Module):
    """Multi-head attention (§3.2): softmax(Q Kᵀ / √(D / H)) V in each of H heads, concatenated and projected.

    Raises ValueError if `width` is not a multiple of `heads`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend from x (B, T, D) to memory (B, S, D); return (B, T, D).

        mask: bool, broadcast to (B, H, T, S); true where a query may attend to a key.
        """
        query = self._split_heads(self.query(x))
        key = self._split_heads(self.key(memory))
        value = self._split_heads(self.value(memory))
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])  # (B, H, T, S)
        # The lowest finite number instead of -inf: softmax of a row with padding alone must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        heads = torch.matmul(weights, value)  # (B, H, T, D / H)
        return self.output(heads.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, T, D) to (B, H, T, D / H)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Feed-forward layer (§3.3): W₂ f(W₁ x + b₁) + b₂ at each position, with f = relu or gelu."""

    def __init__(self, width: int, hidden: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.activation = F.relu if activation == "relu" else F.gelu
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x (B, T, D); return (B, T, D)."""
        return self.contract(self.dropout(self.activation(self.expand(x))))


class Residual(nn.Module):
    """Residual connection around a sublayer f.

    norm: "post" computes LayerNorm(x + f(x)) (§3.1); "pre" computes x + f(LayerNorm(x)) (Xiong et al., 2020).
    """

    def __init__(self, width: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.pre = norm == "pre"
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `sublayer` to x (B, T, D); return (B, T, D)."""
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """An encoder layer (§3.1): self-attention, then feed-forward."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        self.self_attention = MultiHeadAttention(width, config.heads, dropout)
        self.feedforward = FeedForward(width, config.feedforward, config.activation, dropout)
        self.residuals = nn.ModuleList(Residual(width, config.norm, dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Encode x (B, S, D) with mask (B, 1, 1, S); return (B, S, D)."""
        attention_residual, feedforward_residual = self.residuals
        x = attention_residual(x, lambda y: self.self_attention(y, y, mask))
        return feedforward_residual(x, self.feedforward)


class DecoderLayer(nn.Module):
    """A decoder layer (§3.1): causal self-attention, cross-attention to the source, then feed-forward."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        self.self_attention = MultiHeadAttention(width, config.heads, dropout)
        self.cross_attention = MultiHeadAttention(width, config.heads, dropout)
        self.feedforward = FeedForward(width, config.feedforward, config.activation, dropout)
        self.residuals = nn.ModuleList(Residual(width, config.norm, dropout) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Decode x (B, T, D) with mask (B, 1, T, T); return (B, T, D).

        memory: (B, S, D), the encoder's output. memory_mask: (B, 1, 1, S).
        """
        attention_residual, cross_residual, feedforward_residual = self.residuals
        x = attention_residual(x, lambda y: self.self_attention(y, y, mask))
        x = cross_residual(x, lambda y: self.cross_attention(y, memory, memory_mask))
        return feedforward_residual(x, self.feedforward)


class Embedding(nn.Module):
    """√D · token embedding + position embedding, then dropout (§3.4, §3.5).

    positions: "sinusoidal" (a constant table) or "learned" (a weight), of `max_length` rows.
    """

    positions: Tensor

    def __init__(self, vocabulary: int, width: int, max_length: int, positions: str, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        # With this deviation a token has unit variance after the factor √D, and a tied output projection starts with
        # small logits.
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(max_length, width) * 0.02)
        else:
            self.register_buffer("positions", sinusoids(max_length, width), persistent=False)
        self.scale = math.sqrt(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T); return (B, T, D)."""
        return self.dropout(self.tokens(ids) * self.scale + self.positions[: ids.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """Return the sinusoidal position table (length, width) of §3.5.

    PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i + 1) = cos(p / 10000^(2i/D)).
    """
    position = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: width // 2])
    return table


class Seq2SeqTransformer(nn.Module):
    """An encoder-decoder over ids: p(tgt[t + 1] | tgt[..t], src) = softmax(forward(src, tgt)[:, t]).

    Every argument is a JSON value, so that a checkpoint can store the arguments.

    max_length: positions in the tables, and so the maximum length of src and of tgt.
    positions: one of POSITIONS; ValueError otherwise.
    tie_output: use the target embedding as the weight of the output projection (§3.4); its bias is separate.
    source_pad, target_pad: padding ids. Padding follows the last token of a row and is masked in attention.
    layer: the fields of `LayerConfig`.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        *,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        max_length: int = 512,
        positions: str = "sinusoidal",
        tie_output: bool = True,
        source_pad: int = 0,
        target_pad: int = 0,
        **layer: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        check_choice("positions", positions, POSITIONS)
        config = LayerConfig(**layer)
        width = config.width
        self.source_pad = source_pad
        self.target_pad = target_pad
        self.max_length = max_length
        self.source = Embedding(source_vocabulary, width, max_length, positions, config.dropout)
        self.target = Embedding(target_vocabulary, width, max_length, positions, config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(decoder_layers))
        # Pre-norm layers do not normalise the residual stream, so one more norm follows the last layer.
        self.encoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if config.norm == "pre" else nn.Identity()
        self.output = nn.Linear(width, target_vocabulary)
        for weight in (w for layers in (self.encoder, self.decoder) for w in layers.parameters() if w.dim() > 1):
            nn.init.xavier_uniform_(weight)
        if tie_output:
            self.output.weight = self.target.tokens.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Return logits (B, T, V) for src (B, S) and tgt (B, T).

        The logits at t depend on tgt[: t + 1] and on all of src.
        """
        source_mask = self.source_mask(src)
        return self.decode(tgt, self.encode(src, source_mask), source_mask)

    def source_mask(self, src: Tensor) -> Tensor:
        """Return the padding mask (B, 1, 1, S) of src (B, S): true at tokens."""
        return (src != self.source_pad)[:, None, None, :]

    def target_mask(self, tgt: Tensor) -> Tensor:
        """Return the mask (B, 1, T, T) of tgt (B, T): true where the key is a token and not later than the query."""
        time = tgt.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool, device=tgt.device).tril()
        return (tgt != self.target_pad)[:, None, None, :] & causal

    def encode(self, src: Tensor, source_mask: Tensor) -> Tensor:
        """Encode src (B, S) with source_mask (B, 1, 1, S); return the memory (B, S, D)."""
        x = self.source(src)
        for layer in self.encoder:
            x = layer(x, source_mask)
        return self.encoder_norm(x)

    def decode(self, tgt: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """Return logits (B, T, V) for tgt (B, T), memory (B, S, D) and source_mask (B, 1, 1, S)."""
        mask = self.target_mask(tgt)
        x = self.target(tgt)
        for layer in self.decoder:
            x = layer(x, mask, memory, source_mask)
        return self.output(self.decoder_norm(x))
