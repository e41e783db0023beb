"""Seq2SeqTransformer: logits equal torch.nn's layers with the same weights, and do not depend on later tokens or on
padding.
"""

import ast
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tformer_models.seq2seq as module
from tformer_models.seq2seq import MultiHeadAttention, Seq2SeqTransformer, sinusoids

SIZES = {"width": 32, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "feedforward": 48, "max_length": 20}


def tiny(**options):
    torch.manual_seed(3)
    model = Seq2SeqTransformer(11, 13, **{**SIZES, **options}).eval()
    for p in model.parameters():  # norms and biases at their initial values would hide errors
        p.data += 0.1 * torch.randn_like(p)
    return model


def padded_ids():
    """Return three rows of 7, 4, 5 source ids and 6, 3, 5 target ids, padded with 0."""
    torch.manual_seed(4)
    src, tgt = torch.randint(1, 11, (3, 7)), torch.randint(1, 13, (3, 6))
    src[1, 4:], src[2, 5:], tgt[1, 3:], tgt[2, 5:] = 0, 0, 0, 0
    return src, tgt


def copy_attention(target, source):
    target.in_proj_weight.data = torch.cat([source.query.weight, source.key.weight, source.value.weight])
    target.in_proj_bias.data = torch.cat([source.query.bias, source.key.bias, source.value.bias])
    target.out_proj.load_state_dict(source.output.state_dict())


def reference(model, src, tgt, norm, activation):
    """Return the logits of torch.nn.TransformerEncoder and TransformerDecoder with the same weights."""
    options = {"batch_first": True, "norm_first": norm == "pre", "activation": activation, "dropout": 0.0}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, **options), 2)
    for torch_layer, layer in zip([*encoder.layers, *decoder.layers], [*model.encoder, *model.decoder], strict=True):
        copy_attention(torch_layer.self_attn, layer.self_attention)
        if hasattr(layer, "cross_attention"):
            copy_attention(torch_layer.multihead_attn, layer.cross_attention)
        torch_layer.linear1.load_state_dict(layer.feedforward.expand.state_dict())
        torch_layer.linear2.load_state_dict(layer.feedforward.contract.state_dict())
        for i, residual in enumerate(layer.residuals, start=1):
            getattr(torch_layer, f"norm{i}").load_state_dict(residual.norm.state_dict())
    source = model.source.tokens(src) * math.sqrt(32) + model.source.positions[: src.shape[1]]
    target = model.target.tokens(tgt) * math.sqrt(32) + model.target.positions[: tgt.shape[1]]
    later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
    memory = model.encoder_norm(encoder(source, src_key_padding_mask=src == 0))
    x = decoder(target, memory, tgt_mask=later, tgt_key_padding_mask=tgt == 0, memory_key_padding_mask=src == 0)
    return model.output(model.decoder_norm(x))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@torch.no_grad()
def test_logits_equal_torch_layers_with_the_same_weights(norm, activation, positions):
    model = tiny(norm=norm, activation=activation, positions=positions)
    src, tgt = padded_ids()
    is_token = tgt != 0
    torch.testing.assert_close(model(src, tgt)[is_token], reference(model, src, tgt, norm, activation)[is_token])


@torch.no_grad()
def test_attention_equals_scaled_dot_product_attention():
    torch.manual_seed(5)
    attention = MultiHeadAttention(24, 3, dropout=0.0)
    x, memory, mask = torch.randn(2, 5, 24), torch.randn(2, 7, 24), torch.rand(2, 1, 5, 7) < 0.7
    mask[..., 0] = True
    heads = [
        layer(y).view(2, -1, 3, 8).transpose(1, 2)
        for layer, y in ((attention.query, x), (attention.key, memory), (attention.value, memory))
    ]
    joined = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).reshape(2, 5, 24)
    torch.testing.assert_close(attention(x, memory, mask), attention.output(joined))


def test_sinusoids_equal_the_formula_of_the_paper():
    table = sinusoids(9, 6)
    for p in range(9):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert sinusoids(4, 5).shape == (4, 5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_logits_do_not_depend_on_later_tokens(norm):
    model = tiny(norm=norm)
    src, tgt = padded_ids()
    changed = tgt.clone()
    changed[0, 3:] = changed[0, 3:] % 12 + 1
    before, after = model(src, tgt), model(src, changed)
    assert torch.equal(before[0, :3], after[0, :3])
    assert not torch.allclose(before[0, 3:], after[0, 3:])


@torch.no_grad()
def test_logits_do_not_depend_on_padding():
    model = tiny()
    src, tgt = padded_ids()
    padded = model(src, tgt)
    for row, (sources, targets) in enumerate([(7, 6), (4, 3), (5, 5)]):
        alone = model(src[row : row + 1, :sources], tgt[row : row + 1, :targets])
        torch.testing.assert_close(padded[row, :targets], alone[0])


@torch.no_grad()
def test_logits_of_a_row_of_padding_are_finite():
    src, tgt = padded_ids()
    src[1], tgt[1] = 0, 0
    assert tiny()(src, tgt).isfinite().all()


def test_padding_ids_are_configurable():
    model = tiny(source_pad=10, target_pad=12)
    assert not model.source_mask(torch.tensor([[1, 10]]))[0, 0, 0, 1]
    assert model.target_mask(torch.tensor([[0, 12, 3]]))[0, 0].tolist() == [
        [True, False, False],
        [True, False, False],
        [True, False, True],
    ]


def test_tied_output_is_the_target_embedding():
    tied, free = tiny(tie_output=True), tiny(tie_output=False)
    assert tied.output.weight is tied.target.tokens.weight
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in (("tied", tied), ("free", free))}
    assert count["free"] - count["tied"] == 13 * 32


def test_only_learned_position_tables_are_weights():
    assert "source.positions" not in tiny(positions="sinusoidal").state_dict()
    assert tiny(positions="learned").state_dict()["target.positions"].shape == (20, 32)


def test_dropout_is_active_in_training_only():
    model = tiny(dropout=0.5)
    src, tgt = padded_ids()
    assert torch.equal(model(src, tgt), model(src, tgt))
    model.train()
    assert not torch.allclose(model(src, tgt), model(src, tgt))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "5 heads"),
        ({"positions": "none"}, "none"),
        ({"norm": "x"}, "norm"),
        ({"activation": "x"}, "relu"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_arguments_are_json_serializable():
    arguments = {
        **SIZES,
        "norm": "pre",
        "activation": "gelu",
        "positions": "learned",
        "tie_output": False,
        "dropout": 0.25,
    }
    model = Seq2SeqTransformer(11, 13, **json.loads(json.dumps(arguments)))
    assert model.state_dict().keys() == tiny(**arguments).state_dict().keys()


@pytest.mark.parametrize("options", [{}, {"norm": "pre", "positions": "learned", "activation": "gelu"}])
@torch.no_grad()
def test_torch_export_keeps_all_axes_dynamic(options):
    model = tiny(encoder_layers=1, decoder_layers=1, **options)
    batch, source, target = (torch.export.Dim(name, min=2, max=20) for name in ("batch", "source", "target"))
    src, tgt = padded_ids()
    program = torch.export.export(model, (src, tgt), dynamic_shapes=({0: batch, 1: source}, {0: batch, 1: target}))
    other = torch.randint(1, 11, (5, 12)), torch.randint(1, 13, (5, 9))
    torch.testing.assert_close(program.module()(*other), model(*other))


def test_module_imports_torch_and_the_standard_library_only():
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
