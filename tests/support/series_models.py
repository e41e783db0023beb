"""Forecasters written as tutorials write them, and a reference loop that runs the whole sequence for each step."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

WIDTH, MAX_STEPS = 32, 64


class Attention(nn.Module):
    """Hand-written attention with one projection for queries, keys and values."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.packed, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.packed(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        return self.out((scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class DecoderOnly(nn.Module):
    """A decoder with learned positions and three outputs. Outputs 2 and 0 are the next step's two features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        self.positions = nn.Parameter(torch.randn(MAX_STEPS, WIDTH) * 0.3)
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.positions[: x.shape[1]]
        h = h + self.attention(self.norm(h))
        return self.head(h + self.narrow(torch.nn.functional.gelu(self.widen(h))))


class EncoderDecoder(nn.Module):
    """torch.nn.Transformer with linear embeddings and sinusoidal positions: three columns in, one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.source, self.target, self.head = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        position, rate = torch.arange(100)[:, None], torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        table = torch.zeros(100, WIDTH)
        table[:, ::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("table", table)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor, src_padding: torch.Tensor | None = None) -> torch.Tensor:
        causal = self.transformer.generate_square_subsequent_mask(tgt.shape[1])
        decoded = self.transformer(
            self.source(src) + self.table[: src.shape[1]],
            self.target(tgt) + self.table[: tgt.shape[1]],
            tgt_mask=causal,
            src_key_padding_mask=src_padding,
            memory_key_padding_mask=src_padding,
        )
        return self.head(decoded)


class SinglePassForecaster(nn.Module):
    """A model that returns the whole horizon in one run: twelve steps of two columns in, five steps out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.attention = nn.Linear(2, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(12 * WIDTH, 5 * 2)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        h = self.embed(history)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h.flatten(1)).view(-1, 5, 2)


@torch.inference_mode()
def forecast_by_loop(
    model: nn.Module, history: np.ndarray, begin: np.ndarray | None, feedback: list[int], steps: int
) -> np.ndarray:
    """Return the forecast (steps, targets) of a normalised history. Each step runs the whole sequence.

    begin: the first input of the decoder, for an encoder-decoder.
    """
    source = torch.from_numpy(history.astype(np.float32))[None]
    inputs = source if begin is None else torch.from_numpy(begin.astype(np.float32))[None]
    num_begin_rows = inputs.shape[1]
    for _ in range(steps):
        out = model(inputs) if begin is None else model(source, inputs)
        inputs = torch.cat([inputs, out[:, -1:, feedback]], 1)
    return inputs[0, num_begin_rows:].numpy()
