"""A decoder-only language model in plain PyTorch.

Shapes use B = batch, T = time, V = vocabulary.
"""

# Calling a module returns Any.
# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer_models.encoder import PreNormStack


class LanguageModel(nn.Module):
    """A causal Transformer: p(ids[t + 1] | ids[..t]) = softmax(forward(ids)[:, t]).

    tie_output: use the token embedding as the weight of the output projection; its bias is separate.
    pad: padding id, which is masked in attention.
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
        self.states = PreNormStack(
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
        """Return logits (B, T, V) for ids (B, T). The logits at t depend on ids[: t + 1]."""
        time = ids.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool, device=ids.device).tril()
        return self.output(self.states(ids, (ids != self.pad)[:, None, None, :] & causal))
