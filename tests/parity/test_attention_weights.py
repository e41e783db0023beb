"""What each position takes of each, in every layer and head: against transformers' `output_attentions`."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch
import transformers
from text_models import MOST, SHAPE, pieces, scored
from transformers import BertTokenizer, DebertaV2Tokenizer

from tformer_export import export
from tformer_export.cli import main
from tformer_runtime import InputError, Model
from tformer_runtime import manifest as m

SIZES = {**SHAPE, "num_hidden_layers": 2}
INPUTS = ["the film was good", ("a day", "the old night was not very good!"), "we"]
LONG = "the old film " * 30


FAMILIES = {
    "bert": lambda: (
        transformers.BertForSequenceClassification,
        transformers.BertConfig(**SIZES, vocab_size=len(pieces())),
        BertTokenizer(vocab=pieces()),
    ),
    "deberta-v2": lambda: (  # whose scores have a bias of positions, computed of queries and keys
        transformers.DebertaV2Model,
        transformers.DebertaV2Config(
            **SIZES, vocab_size=len(scored()) + 1, relative_attention=True, pos_att_type="c2p|p2c", position_buckets=8,
            share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0,
        ),
        DebertaV2Tokenizer(vocab=scored(), unk_id=3),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family → the module, its tokenizer, the exported file and the report."""

    @functools.cache
    def get(name):
        kind, config, tokenizer = FAMILIES[name]()
        torch.manual_seed(5)
        module, out = kind(config).eval(), tmp_path_factory.mktemp(name) / "model.onnx"
        tokenizer.model_max_length = MOST
        report = export(module, out, tokenizer=tokenizer, attention=True)
        return module, tokenizer, Model.load(out, "cpu"), report

    return get


def theirs(module, tokenizer, input):
    """(layers, heads, time, time)"""
    module.set_attn_implementation("eager")  # others give no weights
    read = tokenizer(*((input,) if isinstance(input, str) else input), truncation=True, return_tensors="pt")
    with torch.no_grad():
        found = module(**read, output_attentions=True).attentions
    return torch.cat(found).numpy(), tokenizer.convert_ids_to_tokens(read["input_ids"][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_transformers(made, name):
    module, tokenizer, model, report = made(name)
    for input in (*INPUTS, LONG):
        weights, tokens = model.attention(input, truncate=input is LONG)
        expected, names = theirs(module, tokenizer, input)
        np.testing.assert_allclose(weights, expected, atol=1e-5)
        assert weights.shape[:2] == (2, 4)
        assert tokens == names
    (extra,) = model.manifest.extras
    assert (extra.kind, extra.shape) == (m.ATTENTION, ("batch", 2, 4, "input_ids_length", "input_ids_length"))
    assert report.parity.extras.keys() == {"attention"}  # of ragged rows, too
    with pytest.raises(InputError, match="the model takes at most 38"):
        model.attention(LONG)


def test_weights_of_a_folder_in_eight_bits(made, tmp_path, monkeypatch, capsys):
    module, tokenizer, model, _ = made("bert")
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = tmp_path / "x.onnx"
    command = ["tformer-export", str(tmp_path), "-o", str(out), "--quantize", "int8", "--attention"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    rows = dict(line.split(None, 1) for line in capsys.readouterr().err.splitlines() if len(line.split()) > 1)
    assert rows["attention"].startswith("max |Δ| ")
    weights, _ = Model.load(out, "cpu").attention(INPUTS[0])
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert 0 < np.abs(weights - model.attention(INPUTS[0])[0]).max() < 0.1
