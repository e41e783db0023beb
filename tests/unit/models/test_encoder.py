"""Sentence encoder, classifier and language model: outputs equal torch.nn's layers, and do not depend on padding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tformer_models.encoder import POOLINGS, SelfAttention, SentenceClassifier, SentenceEncoder
from tformer_models.language_model import LanguageModel

SIZES = {"width": 32, "heads": 4, "layers": 2, "feedforward": 48, "max_length": 20}
ROWS = [[3, 9, 4, 4, 7, 1, 5], [8, 2, 6], [5]]


def tiny(kind, *arguments, **options):
    torch.manual_seed(3)
    model = kind(11, *arguments, **SIZES, **options).eval()
    for p in model.parameters():  # norms and biases at their initial values would hide errors
        p.data += 0.1 * torch.randn_like(p)
    return model


def padded_ids():
    return torch.tensor([row + [0] * (7 - len(row)) for row in ROWS])


def torch_layers(layers, ids, mask=None):
    """Return the states of torch.nn.TransformerEncoder with the same weights."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False).eval()
    for torch_layer, model_layer in zip(encoder.layers, layers.layers, strict=True):
        torch_layer.self_attn.in_proj_weight.data = model_layer.attention.qkv.weight.data
        torch_layer.self_attn.in_proj_bias.data = model_layer.attention.qkv.bias.data
        torch_layer.self_attn.out_proj.load_state_dict(model_layer.attention.output.state_dict())
        torch_layer.linear1.load_state_dict(model_layer.feedforward.expand.state_dict())
        torch_layer.linear2.load_state_dict(model_layer.feedforward.contract.state_dict())
        for i, residual in enumerate(model_layer.residuals, start=1):
            getattr(torch_layer, f"norm{i}").load_state_dict(residual.norm.state_dict())
    encoder.norm.load_state_dict(layers.norm.state_dict())
    x = layers.embedding.tokens(ids) * math.sqrt(32) + layers.embedding.positions[: ids.shape[1]]
    return encoder(x, mask=mask)


OPTION_SETS = [
    *({"pool": pool} for pool in POOLINGS),
    {"pool": "mean", "vector": 5, "normalize": True, "positions": "sinusoidal"},
]


@torch.inference_mode()
@pytest.mark.parametrize("options", OPTION_SETS, ids=str)
def test_vectors_equal_pooled_states_of_torch_layers_with_any_padding(options):
    model = tiny(SentenceEncoder, **options)
    outputs = model(padded_ids())
    for row, vector in zip(ROWS, outputs, strict=True):
        (states,) = torch_layers(model.states, torch.tensor([row]))
        expected = {"first": states[0], "mean": states.mean(0), "max": states.amax(0)}[options["pool"]]
        expected = F.linear(expected, *model.project.parameters()) if "vector" in options else expected
        expected = expected / expected.norm() if "normalize" in options else expected
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_scores_of_a_row_do_not_depend_on_other_rows():
    model = tiny(SentenceClassifier, 4, pool="first")
    outputs = model(padded_ids())
    assert outputs.shape == (3, 4)
    for row, scores in zip(ROWS, outputs, strict=True):
        (vector,) = model.encoder(torch.tensor([row]))
        torch.testing.assert_close(scores, F.linear(vector, model.output.weight, model.output.bias))


@torch.inference_mode()
@pytest.mark.parametrize("tie_output", [True, False])
def test_logits_depend_on_earlier_tokens_and_not_on_padding(tie_output):
    model = tiny(LanguageModel, tie_output=tie_output)
    assert (model.output.weight is model.states.embedding.tokens.weight) == tie_output
    outputs = model(padded_ids())
    for row, logits in zip(ROWS, outputs, strict=True):
        later = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
        expected = model.output(torch_layers(model.states, torch.tensor([row]), later))[0]
        torch.testing.assert_close(logits[: len(row)], expected, atol=1e-4, rtol=1e-5)


def test_logits_of_a_row_of_padding_are_finite():
    assert torch.isfinite(tiny(LanguageModel)(torch.zeros(1, 4, dtype=torch.long))).all()


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="the width 32 is not a multiple of 5 heads"):
        SelfAttention(32, 5, 0.0)
    with pytest.raises(ValueError, match="pool must be one of first, mean, max, not 'last'"):
        SentenceEncoder(11, pool="last")
