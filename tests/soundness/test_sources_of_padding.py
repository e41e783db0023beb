"""Cross-attention to a source that the model itself hides as a whole: the file gives what torch gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from soundness.models import HEADS, LONGEST, RARE, VOCABULARY, WIDTH
from tformer_export import export
from tformer_runtime import InputError, Model

PAD = 0
SOURCES = [[4, PAD, 5], [PAD, PAD, PAD], [PAD], [PAD, 3, PAD, 8]]
TARGET = [5, RARE, PAD, 7, 9]
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _kept(source: torch.Tensor) -> torch.Tensor:
    return (source != PAD)[:, None, None, :]


def _numbers(hidden: torch.Tensor, number: float) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, number)


MASKS: dict[str, Mask] = {
    "truth": lambda source, ids: _kept(source),
    "infinity": lambda source, ids: _numbers(~_kept(source), -math.inf),
    "lowest": lambda source, ids: _numbers(~_kept(source), torch.finfo(torch.float32).min),
    "each_position": lambda source, ids: _kept(source).expand(-1, -1, ids.shape[1], -1),
    "target_too": lambda source, ids: _kept(source) & (ids != PAD)[:, None, :, None],
    "rare_target": lambda source, ids: _kept(source) & (ids != RARE)[:, None, :, None],
}


class Translator(nn.Module):
    """Ids of a source and of a target → logits (batch, time, vocabulary). mask: what cross-attention may see."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.positions, self.head = nn.Embedding(LONGEST, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.query, self.memory = (nn.Linear(WIDTH, parts * WIDTH) for parts in (3, 1, 2))

    def cross_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, source: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.target(ids) + self.positions(torch.arange(ids.shape[1]))
        own = functional.scaled_dot_product_attention(*self._heads(self.qkv(x), 3), is_causal=True)
        x = x + own.transpose(1, 2).flatten(2)
        parts = *self._heads(self.query(x), 1), *self._heads(self.memory(self.source(source)), 2)
        return self.head(x + self.cross_attention(*parts, self.mask(source, ids)).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, parts: int) -> list[torch.Tensor]:
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in x.chunk(parts, -1)]


class ByHand(Translator):
    """A softmax of −∞ alone is NaN."""

    def cross_attention(self, q, k, v, mask):
        scores = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)).masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v


class ByLayer(Translator):
    """torch's own layer, whose mask is true where a key is hidden."""

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, source, ids):
        x = self.target(ids) + self.positions(torch.arange(ids.shape[1]))
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(
            self.layer(x, self.source(source), causal, memory_key_padding_mask=source == PAD, tgt_is_causal=True)
        )


CASES = [pytest.param(Translator, mask, id=name) for name, mask in MASKS.items()] + [
    pytest.param(ByHand, MASKS["truth"], id="by_hand"),
    pytest.param(ByLayer, MASKS["truth"], id="by_layer"),
]


@pytest.mark.parametrize(("build", "mask"), CASES)
def test_a_source_of_padding_gets_what_torch_gives_it(build: type[Translator], mask: Mask, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = build(mask).eval()
    example = {"source": torch.tensor([[4, 5, 6, 7, 9, 3]]), "ids": torch.tensor([[1, 5, 6, 7]])}
    export(module, tmp_path / "model.onnx", example, "ids")
    model = Model.load(tmp_path / "model.onnx", device="cpu")
    for source in SOURCES:
        with torch.no_grad():
            logits = module(torch.tensor([source]), torch.tensor([TARGET]))[0]
        expected = logits.log_softmax(-1)[range(len(TARGET) - 1), TARGET[1:]].numpy()
        if np.isnan(expected).any():
            with pytest.raises(InputError, match="NaN"):
                model.score(source, TARGET)
        else:
            np.testing.assert_allclose(model.score(source, TARGET), expected, rtol=0, atol=1e-4)
