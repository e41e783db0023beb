"""Sentence encoder, classifier and language model: what PyTorch's own layers compute, and nothing of padding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tformer_models.encoder import POOLS, SelfAttention, SentenceClassifier, SentenceEncoder
from tformer_models.language_model import LanguageModel

SIZES = {"width": 32, "heads": 4, "layers": 2, "feedforward": 48, "max_length": 20}
ROWS = [[3, 9, 4, 4, 7, 1, 5], [8, 2, 6], [5]]


def tiny(kind, *arguments, **options):
    torch.manual_seed(3)
    model = kind(11, *arguments, **SIZES, **options).eval()
    for p in model.parameters():  # no norm or bias may stay at a value that hides a mistake
        p.data += 0.1 * torch.randn_like(p)
    return model


def padded():
    return torch.tensor([row + [0] * (7 - len(row)) for row in ROWS])


def torchs_own(layers, ids, mask=None):
    """The same layers out of torch.nn.TransformerEncoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False).eval()
    for one, ours in zip(theirs.layers, layers.layers, strict=True):
        one.self_attn.in_proj_weight.data = ours.attention.qkv.weight.data
        one.self_attn.in_proj_bias.data = ours.attention.qkv.bias.data
        one.self_attn.out_proj.load_state_dict(ours.attention.output.state_dict())
        one.linear1.load_state_dict(ours.feedforward.expand.state_dict())
        one.linear2.load_state_dict(ours.feedforward.contract.state_dict())
        for i, residual in enumerate(ours.residuals, start=1):
            getattr(one, f"norm{i}").load_state_dict(residual.norm.state_dict())
    theirs.norm.load_state_dict(layers.norm.state_dict())
    x = layers.embedding.tokens(ids) * math.sqrt(32) + layers.embedding.positions[: ids.shape[1]]
    return theirs(x, mask=mask)


CHOICES = [
    *({"pool": pool} for pool in POOLS),
    {"pool": "mean", "vector": 5, "normalize": True, "positions": "sinusoidal"},
]


@torch.inference_mode()
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_vectors_are_pooled_states_of_torchs_own_layers_whatever_the_padding(options):
    model = tiny(SentenceEncoder, **options)
    found = model(padded())
    for row, vector in zip(ROWS, found, strict=True):
        (states,) = torchs_own(model.states, torch.tensor([row]))
        expected = {"first": states[0], "mean": states.mean(0), "max": states.amax(0)}[options["pool"]]
        expected = F.linear(expected, *model.project.parameters()) if "vector" in options else expected
        expected = expected / expected.norm() if "normalize" in options else expected
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_rows_scores_do_not_depend_on_the_rows_beside_it():
    model = tiny(SentenceClassifier, 4, pool="first")
    found = model(padded())
    assert found.shape == (3, 4)
    for row, scores in zip(ROWS, found, strict=True):
        (vector,) = tiny_vector(model, row)
        torch.testing.assert_close(scores, F.linear(vector, model.output.weight, model.output.bias))


def tiny_vector(model, row):
    return model.encoder(torch.tensor([row]))


@torch.inference_mode()
@pytest.mark.parametrize("tie_output", [True, False])
def test_logits_see_what_came_before_and_no_padding(tie_output):
    model = tiny(LanguageModel, tie_output=tie_output)
    assert (model.output.weight is model.states.embedding.tokens.weight) == tie_output
    found = model(padded())
    for row, logits in zip(ROWS, found, strict=True):
        later = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
        expected = model.output(torchs_own(model.states, torch.tensor([row]), later))[0]
        torch.testing.assert_close(logits[: len(row)], expected, atol=1e-4, rtol=1e-5)


def test_a_row_of_padding_alone_is_finite():
    assert torch.isfinite(tiny(LanguageModel)(torch.zeros(1, 4, dtype=torch.long))).all()


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match="a width of 32 cannot be shared by 5 heads"):
        SelfAttention(32, 5, 0.0)
    with pytest.raises(ValueError, match="pool must be one of first, mean, max, not 'last'"):
        SentenceEncoder(11, pool="last")
