"""Forecasters of continuous series in plain PyTorch. A linear layer embeds the numbers of a step.

`DecoderForecaster` and `EncoderDecoderForecaster` are autoregressive: they predict the next step, which becomes an
input. `EncoderForecaster` predicts the whole horizon in one call. All have the methods that `ForecastObjective` trains
with: `teacher_force` and `forecast`. Shapes use B = batch, S = history time, T = target time, F = features, D = width.
"""

# Calling a module returns Any.
# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer_models.seq2seq import sinusoids

POSITIONS = ("sinusoidal", "learned")


class StepEmbedding(nn.Module):
    """Linear projection of each step's features + position embedding, then dropout.

    positions: one of POSITIONS; ValueError otherwise.
    """

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
        """Embed x (B, T, F); return (B, T, D)."""
        return self.dropout(self.project(x) + self.positions[: x.shape[1]])


def _build_encoder(width: int, heads: int, layers: int, feedforward: int, dropout: float) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)


def _init_small(linear: nn.Linear) -> None:
    """Initialise the weight with deviation 0.02 and the bias with 0, so that the first outputs are small."""
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)


class DecoderForecaster(nn.Module):
    """A decoder-only forecaster: forward(x)[:, t] predicts x[:, t + 1] from x[:, : t + 1].

    The model predicts the difference from the current step, so an untrained model predicts almost no change.
    """

    step_input = "x"  # the autoregressive input of forward

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
        self.steps = StepEmbedding(features, width, max_length, positions, dropout)
        self.layers = _build_encoder(width, heads, layers, feedforward, dropout)
        self.output = nn.Linear(width, features)
        _init_small(self.output)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next step of each step of x (B, T, F): (B, T, F)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return x + self.output(self.layers(self.steps(x), mask=mask, is_causal=True))

    def teacher_force(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Predict each step of a window (B, T, F) after the first from the true steps before it.

        Return predictions and targets, both (B, T - 1, F). `context` has no effect: every prefix is a history.
        """
        return self(window[:, :-1]), window[:, 1:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """Return the forecast (B, horizon, F) of history (B, S, F).

        Predictions are fed back. All of forward is computed again for each step.
        """
        x = history
        for _ in range(horizon):
            x = torch.cat([x, self(x)[:, -1:]], dim=1)
        return x[:, history.shape[1] :]


class EncoderDecoderForecaster(nn.Module):
    """An encoder-decoder forecaster: forward(src, tgt)[:, t] predicts tgt[:, t + 1] from src and tgt[:, : t + 1].

    The encoder reads the history; the decoder begins with its last step. The model predicts the difference from the
    current step.
    """

    step_input = "tgt"  # the autoregressive input of forward

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
        self.source = StepEmbedding(features, width, max_length, positions, dropout)
        self.target = StepEmbedding(features, width, max_length, positions, dropout)
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
        _init_small(self.output)

    def forward(self, src: Tensor, tgt: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """Return the next step (B, T, F) of each step of tgt (B, T, F), for the history src (B, S, F).

        src_padding: bool (B, S), true at the padding of histories that are shorter than S; padding is masked.
        """
        return self.decode(tgt, self.encode(src, src_padding), src_padding)

    def encode(self, src: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """Encode src (B, S, F); return the memory (B, S, D)."""
        return self.transformer.encoder(self.source(src), src_key_padding_mask=src_padding)

    def decode(self, tgt: Tensor, memory: Tensor, src_padding: Tensor | None = None) -> Tensor:
        """Return the next step (B, T, F) of each step of tgt (B, T, F), for memory (B, S, D)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        if src_padding is not None:  # nn.Transformer requires masks of one type
            mask = mask != 0
        decoded = self.transformer.decoder(
            self.target(tgt), memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=src_padding
        )
        return tgt + self.output(decoded)

    def teacher_force(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Predict each step of a window (B, T, F) after the first `context` from the true steps before it.

        Return predictions and targets, both (B, T - context, F).
        """
        return self(window[:, :context], window[:, context - 1 : -1]), window[:, context:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """Return the forecast (B, horizon, F) of history (B, S, F).

        Predictions are fed back. The history is encoded once; all of the decoder is computed again for each step.
        """
        memory, tgt = self.encode(history), history[:, -1:]
        for _ in range(horizon):
            tgt = torch.cat([tgt, self.decode(tgt, memory)[:, -1:]], dim=1)
        return tgt[:, 1:]


class EncoderForecaster(nn.Module):
    """An encoder-only forecaster, which predicts the whole horizon in one call.

    The encoder's output is added to the history, and one linear map over time, shared by all features, gives the
    forecast. If the encoder adds zero, this is the linear forecast of Zeng et al. (2023), "Are Transformers Effective
    for Time Series Forecasting?". All histories have `context` steps.
    """

    step_input = None  # forward is called once per forecast

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
        self.steps = StepEmbedding(features, width, context, positions, dropout)
        self.layers = _build_encoder(width, heads, layers, feedforward, dropout)
        self.output = nn.Linear(width, features)
        self.over_time = nn.Linear(context, horizon)
        _init_small(self.output)
        nn.init.zeros_(self.over_time.weight)
        nn.init.zeros_(self.over_time.bias)

    def forward(self, history: Tensor) -> Tensor:
        """Return the forecast (B, horizon, F) of history (B, S, F)."""
        refined = history + self.output(self.layers(self.steps(history)))
        return self.over_time(refined.transpose(1, 2)).transpose(1, 2)

    def teacher_force(self, window: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Forecast the steps of a window (B, T, F) after the first `context`.

        Return predictions and targets, both (B, T - context, F). No prediction is fed back, so `forecast`
        returns the same values.
        """
        return self(window[:, :context]), window[:, context:]

    def forecast(self, history: Tensor, horizon: int) -> Tensor:
        """Return the first `horizon` steps of the forecast (B, horizon, F) of history (B, S, F)."""
        return self(history)[:, :horizon]
