"""Functions of torch that run neither below a mode nor in a trace are exported as plain operations.

The gate of each export compares the file with torch's own functions.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.small_models import EXAMPLE, VOCABULARY, WIDTH, Mixer, Small, joined
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tformer_export import export
from tformer_export.common.module_state import PlainTorch
from tformer_runtime.base.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch advises to compile flex_attention


class BlockMask(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        time = x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 4), None, None, time, time, device="cpu")
        return joined(flex_attention(q, k, v, block_mask=mask))


class ScoreFunction(Mixer):
    """Linear biases, and one key for two heads."""

    def forward(self, x, tgt):
        q, k, v = self.heads(x)

        def biased(score, b, h, i, j):
            return torch.where(i >= j, score - (i - j) * 0.1 * (h + 1), -torch.inf)

        return joined(flex_attention(q, k[:, :1], v[:, :1], score_mod=biased, enable_gqa=True))


class LowerRight(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(x.shape[1], x.shape[1])))


class UpperLeft(Mixer):
    def forward(self, x, tgt):
        q, k, v = self.heads(x)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(x.shape[1], x.shape[1])))


class RenormedBag(Mixer):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, max_norm=1.0, mode="sum")

    def forward(self, x, tgt):
        return x + self.bag(tgt.reshape(-1, 1)).view(x.shape)


@pytest.mark.parametrize("mixer", [BlockMask, ScoreFunction, LowerRight, UpperLeft, RenormedBag])
def test_function_is_exported(mixer, tmp_path):
    assert export(Small(mixer).eval(), tmp_path / "model.onnx", EXAMPLE, "tgt").tokens_equal


def test_embedding_with_a_greatest_norm_is_exported(tmp_path):
    model = Small(Mixer)
    model.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5, norm_type=1.0)
    model.mix = nn.Linear(WIDTH, WIDTH)
    model.forward = lambda tgt: model.out(model.mix(model.embed(tgt)))
    assert export(model.eval(), tmp_path / "model.onnx", EXAMPLE, "tgt").tokens_equal


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tgt):
        return self.out(self.embed(tgt))


def test_export_leaves_weights_that_torch_scales_in_place(tmp_path):
    model = Tied(tied=False).eval()
    before = model.embed.weight.detach().clone()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert torch.equal(model.embed.weight, before)


def test_scaled_weights_that_are_read_elsewhere_are_refused_by_name(tmp_path):
    model = Tied(tied=True).eval()
    before = model.embed.weight.detach().clone()
    with pytest.raises(UnsupportedModelError, match=r"embed has max_norm.*set max_norm to None"):
        export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert torch.equal(model.embed.weight, before)
    with torch.no_grad():
        model.embed.weight.copy_(torch.renorm(before, 2.0, 0, 0.5))
    model.embed.max_norm = None
    assert export(model, tmp_path / "model.onnx", EXAMPLE, "tgt").tokens_equal


def test_row_that_sees_nothing_gets_zeros_as_in_torch():
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    blocks = create_block_mask(lambda b, h, q, k: (k <= q) & (q != 2), 1, 1, 5, 5, device="cpu")

    def score(scores, b, h, q, k):
        return torch.where(q == 4, -torch.inf, scores + 0.1 * (k - q))

    expected = flex_attention(query, key, value, score_mod=score, block_mask=blocks)
    assert (expected[:, :, [2, 4]] == 0).all()
    with PlainTorch():
        actual = flex_attention(query, key, value, score_mod=score, block_mask=blocks)
    torch.testing.assert_close(actual, expected)


def test_functions_are_torchs_own_afterwards():
    before = F.embedding, F.embedding_bag
    with PlainTorch():
        with PlainTorch():
            pass
        assert type(causal_lower_right(2, 3)) is torch.Tensor
        assert torch.equal(causal_lower_right(2, 3), torch.ones(2, 3, dtype=torch.bool).tril(1))
        ids, table = torch.tensor([0, 1]), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        assert F.embedding(ids, table, max_norm=1.0).norm(dim=1).tolist() == pytest.approx([1.0, 0.5])
        assert table[0].tolist() == [3.0, 4.0]
    assert (F.embedding, F.embedding_bag) == before
    assert isinstance(causal_lower_right(2, 3), CausalBias)
