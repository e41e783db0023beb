"""A single-pass model that leaves out its mask for batches without padding: `if not pad.any(): pad = None`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.handwritten_case import PAD, VOCABULARY
from tiny import WIDTH, Attention
from torch import nn

from tformer_export import export
from tformer_runtime import Model, UnsupportedModelError

ROWS = [[5, 9, 31], [7, 8, 9, 10, 11, 12, 40], [44]]


class Shortcut(nn.Module):
    """An encoder in the style of protein language models: padding is hidden from embeddings and keys."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        padding_mask = tokens.eq(PAD)
        if not padding_mask.any():
            padding_mask = None
        x = self.tokens(tokens)
        if padding_mask is not None:
            x = x * (1 - padding_mask.unsqueeze(-1).type_as(x))
        x = x + self.attention(self.norm(x), None if padding_mask is None else padding_mask[:, None, None])
        return self.norm(x)[:, 0]


class Mean(Shortcut):
    """The branch without padding computes something else: no path is right for both."""

    def forward(self, tokens):
        vectors = super().forward(tokens)
        return vectors if tokens.eq(PAD).any() else vectors * 2


def test_general_path_is_taken_and_equals_pytorch_for_both_kinds_of_data(tmp_path):
    torch.manual_seed(0)
    model = Shortcut().eval()
    path = tmp_path / "model.onnx"
    export(model, path, {"tokens": torch.tensor([[3, 4, 5], [6, 7, 8]])}, None, special_tokens={"pad_token_id": PAD})
    file = Model.load(path, "cpu", threads=1)
    actual = file.embed([np.array(row) for row in ROWS], batch_size=3)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])) for row in ROWS]).numpy()
        padded = model(nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ROWS], batch_first=True)).numpy()
    # float32 rounds sums of 24 products by at most 24 · 2⁻²⁴ of values below 10, in the order of the kernel.
    np.testing.assert_allclose(actual, padded, rtol=0, atol=2e-5)
    np.testing.assert_allclose(actual, alone, rtol=0, atol=2e-5)


def test_paths_with_other_results_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="lets the values of its data decide which code runs"):
        export(Mean().eval(), tmp_path / "model.onnx", {"tokens": torch.tensor([[3, 4, 5]])}, None)
