"""Forecasters of continuous series, in plain PyTorch: numbers go in through a linear layer, in the place of embeddings.

Two are trained to say the next step, and forecast by reading what they have said: the output at a step is the input of
the next. The third gives all steps at once. Shapes are written with B = batch, S = history time, T = target time,
F = features, D = width.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer_models.seq2seq import sinusoids

POSITIONS = ("sinusoidal", "learned")


class Steps(nn.Module):
    """Linear map of each step's numbers + its position, with dropout."""

    positions: Tensor

    def __init__(self, features: int, width: int, max_length: int, positions: str, dropout: float) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, not {positions!r}")
        self.project = nn.Linear(features, width)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(max_length, width) * 0.02)
        else:
            self.register_buffer("positions", sinusoids(max_length, width), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, F) → (B, T, D)"""
        return self.dropout(self.project(x) + self.positions[: x.shape[1]])


def _encoder(width: int, heads: int, layers: int, feedforward: int, dropout: float) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)


def _begin_small(linear: nn.Linear) -> None:
    """Have the layer add little to begin with."""
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)


class DecoderForecaster(nn.Module):
    """A decoder alone: forward(x)[:, t] is what follows x[:, : t + 1].

    The output is the last step and what the model adds to it, so that a new model forecasts no change.
    """

    step = "x"

    def __init__(
        self,
        features: int,
        *,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        feedforward: int = 128,
        dropout: float = 0.1,
        max_length: int = 256,
        positions: str = "sinusoidal",
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.steps = Steps(features, width, max_length, positions, dropout)
        self.layers = _encoder(width, heads, layers, feedforward, dropout)
        self.output = nn.Linear(width, features)
        _begin_small(self.output)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, F) → (B, T, F)"""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return x + self.output(self.layers(self.steps(x), mask=mask, is_causal=True))

    def one_step(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """What the model says of a window (B, T, F) step by step, each after the true ones before, and what is true."""
        return self(window[:, :-1]), window[:, 1:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """history (B, S, F) → (B, horizon, F), fed back; the whole of forward runs anew for each step."""
        x = history
        for _ in range(horizon):
            x = torch.cat([x, self(x)[:, -1:]], dim=1)
        return x[:, history.shape[1] :]


class Forecaster(nn.Module):
    """An encoder that reads the history, and a decoder that begins with its last step: forward(src, tgt)[:, t] is what
    follows tgt[:, : t + 1]. The output is the last step and what the model adds to it."""

    step = "tgt"

    def __init__(
        self,
        features: int,
        *,
        width: int = 64,
        heads: int = 4,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        feedforward: int = 128,
        dropout: float = 0.1,
        max_length: int = 256,
        positions: str = "sinusoidal",
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.source = Steps(features, width, max_length, positions, dropout)
        self.target = Steps(features, width, max_length, positions, dropout)
        self.transformer = nn.Transformer(
            width,
            heads,
            encoder_layers,
            decoder_layers,
            feedforward,
            dropout,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        self.output = nn.Linear(width, features)
        _begin_small(self.output)

    def forward(self, src: Tensor, tgt: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """src (B, S, F), tgt (B, T, F) → (B, T, F)

        src_padding: (B, S) bool, true where a history that is shorter than others has steps behind its end. What stands
        there is not looked at.
        """
        return self.decode(tgt, self.encode(src, src_padding), src_padding)

    def encode(self, src: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """src (B, S, F) → memory (B, S, D)"""
        return self.transformer.encoder(self.source(src), src_key_padding_mask=src_padding)

    def decode(self, tgt: Tensor, memory: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """tgt (B, T, F), memory (B, S, D) → (B, T, F)"""
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        if src_padding is not None:  # torch wants masks of one type
            mask = mask != 0
        decoded = self.transformer.decoder(
            self.target(tgt), memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=src_padding
        )
        return tgt + self.output(decoded)

    def one_step(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """What the model says after `context` steps of a window (B, T, F), each after the true ones before, and what is
        true."""
        return self(window[:, :context], window[:, context - 1 : -1]), window[:, context:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """history (B, S, F) → (B, horizon, F), fed back; the whole of the decoder runs anew for each step."""
        memory, tgt = self.encode(history), history[:, -1:]
        for _ in range(horizon):
            tgt = torch.cat([tgt, self.decode(tgt, memory)[:, -1:]], dim=1)
        return tgt[:, 1:]


class EncoderForecaster(nn.Module):
    """An encoder alone, which gives the whole horizon at once: what it makes of each step of the history is added to
    that, and one linear map over time, the same for all features, makes the forecast of it.

    Where the encoder adds nothing, this is a linear forecast, which Zeng et al. (2023, "Are Transformers Effective for
    Time Series Forecasting?") ask any to be compared with. All histories have `context` steps.
    """

    step = None

    def __init__(
        self,
        features: int,
        *,
        context: int,
        horizon: int,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        feedforward: int = 128,
        dropout: float = 0.1,
        positions: str = "sinusoidal",
    ) -> None:
        super().__init__()
        self.steps = Steps(features, width, context, positions, dropout)
        self.layers = _encoder(width, heads, layers, feedforward, dropout)
        self.output = nn.Linear(width, features)
        self.over_time = nn.Linear(context, horizon)
        _begin_small(self.output)
        nn.init.zeros_(self.over_time.weight)
        nn.init.zeros_(self.over_time.bias)

    def forward(self, history: Tensor) -> Tensor:
        """history (B, S, F) → (B, horizon, F)"""
        refined = history + self.output(self.layers(self.steps(history)))
        return self.over_time(refined.transpose(1, 2)).transpose(1, 2)

    def one_step(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """The forecast that follows `context` steps of a window (B, T, F), and what is true: all is one step."""
        return self(window[:, :context]), window[:, context:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """history (B, S, F) → (B, horizon, F)"""
        return self(history)[:, :horizon]
