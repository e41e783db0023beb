"""Values of earlier positions with an axis as long as the source: they are computed again, and never cached.

The gate compares each file with the module at several lengths of both inputs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.small_models import here, refusal
from torch import nn

from tformer_export import export

EXAMPLE = {"src": torch.tensor([[5, 6, 7]]), "tgt": torch.tensor([[1, 4]])}
TOLD = {"max_length": 24, "special_tokens": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}}


class Coverage(nn.Module):
    """Scores of the source are lowered by the attention of earlier positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.out = nn.Embedding(20, 16), nn.Embedding(32, 16), nn.Linear(16, 20)

    def forward(self, src, tgt):
        source, states = (self.embed(ids) + self.place(torch.arange(ids.shape[1])) for ids in (src, tgt))
        scores = (states @ source.transpose(1, 2)).masked_fill((src == 0)[:, None], -1e9)
        return self.out(states + (scores - self.earlier(scores.softmax(-1))).softmax(-1) @ source)

    def earlier(self, weights):
        return weights.cumsum(1)


class MeanSoFar(Coverage):
    def earlier(self, weights):
        return weights.cumsum(1) / torch.arange(1, weights.shape[1] + 1)[:, None]


class FewBefore(Coverage):
    def earlier(self, weights):
        return weights + F.pad(weights, (0, 0, 2, 0))[:, :-2]


@pytest.mark.parametrize("model", [Coverage, MeanSoFar, FewBefore])
def test_state_over_the_source_is_exported(model, tmp_path):
    assert export(model().eval(), tmp_path / "model.onnx", EXAMPLE, "tgt", **TOLD).tokens_equal


class AttendsToScores(Coverage):
    """Attention over earlier positions, whose values have an entry for each position of the source."""

    def earlier(self, weights):
        seen = torch.ones(weights.shape[1], weights.shape[1], dtype=torch.bool).tril()
        summed = weights.sum(-1, keepdim=True)
        own = (summed @ summed.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1)
        return own @ weights  # HERE


def test_cache_with_an_axis_of_the_source_is_refused(tmp_path):
    message = refusal(AttendsToScores().eval(), tmp_path, example=EXAMPLE, step_input="tgt", **TOLD)
    assert f"at {here(AttendsToScores.earlier)} is needed for earlier positions too" in message
    assert "has an axis whose size follows from another input" in message
