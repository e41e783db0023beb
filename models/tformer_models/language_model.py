"""A decoder-only language model, in plain PyTorch."""

# Calling a module gives Any.
# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer_models.encoder import Layers


class LanguageModel(nn.Module):
    """p(ids[t + 1] | ids[..t]) = softmax(forward(ids)[:, t]). `pad` is the id of padding, which is never looked at.

    `tie_output` uses the embedding as the output projection, which then has a bias of its own only.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 256,
        heads: int = 4,
        layers: int = 6,
        feedforward: int = 1024,
        dropout: float = 0.1,
        max_length: int = 512,
        positions: str = "learned",
        tie_output: bool = True,
        pad: int = 0,
    ) -> None:
        super().__init__()
        self.pad = pad
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
        self.output = nn.Linear(width, vocabulary)
        if tie_output:
            self.output.weight = self.states.embedding.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → logits (B, T, V); logits at t see ids[: t + 1]"""
        time = ids.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool, device=ids.device).tril()
        return self.output(self.states(ids, (ids != self.pad)[:, None, None, :] & causal))
