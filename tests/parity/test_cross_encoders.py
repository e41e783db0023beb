"""Scores of CrossEncoders of sentence-transformers: the activation that a folder names is that of the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from support.text_models import SHAPE, wordpiece_vocabulary
from torch import nn
from transformers import BertTokenizer

from tformer_export import export
from tformer_export.sources import load_source
from tformer_runtime import Model, SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL

PAIRS = [("the film was good", "we"), ("a very old model", "it is not bad"), ("day", "the file reads of it")]
OPTIONS = "config_sentence_transformers.json"


def save_base(folder, labels):
    """Save a classifier."""
    torch.manual_seed(1)
    shape = {name: value for name, value in SHAPE.items() if "label" not in name}
    config = transformers.BertConfig(**shape, vocab_size=len(wordpiece_vocabulary()), num_labels=labels)
    module = transformers.BertForSequenceClassification(config)
    module.save_pretrained(folder)
    BertTokenizer(vocab=wordpiece_vocabulary(), model_max_length=38).save_pretrained(folder)
    return folder


def save(folder, labels=1, activation=None):
    model = sentence_transformers.CrossEncoder(str(save_base(folder / "base", labels)), activation_fn=activation)
    model.save_pretrained(str(folder / "whole"), create_model_card=False)
    return model, folder / "whole"


def scores(path, pairs=PAIRS):
    results = Model.load(path, "cpu", threads=1).classify(pairs)
    return np.array([list(result.scores.values()) for result in results])


@pytest.mark.parametrize(("labels", "activation"), [(1, nn.Identity()), (3, nn.Tanh())])
def test_scores_match_the_cross_encoder(labels, activation, tmp_path):
    """A model in memory and its folder give the same scores: the named ones, whatever the number of labels."""
    model, folder = save(tmp_path, labels, activation)
    expected = model.predict(PAIRS).reshape(len(PAIRS), labels)
    report = export(model if labels == 3 else load_source(folder), tmp_path / "x.onnx")
    np.testing.assert_allclose(scores(tmp_path / "x.onnx"), expected, atol=1e-5)
    assert report.parity.raw.pairs == 4


@pytest.mark.parametrize(
    ("labels", "activation", "problem_type"),
    [
        (1, None, MULTI_LABEL),
        (3, None, REGRESSION),  # sentence-transformers applies nothing to several scores
        (3, nn.Sigmoid(), MULTI_LABEL),
        (3, nn.Softmax(-1), SINGLE_LABEL),
    ],
)
def test_activation_decides_the_problem_type(labels, activation, problem_type, tmp_path):
    _, folder = save(tmp_path, labels, activation)
    assert load_source(folder).output_meaning.problem_type == problem_type


def test_activation_is_read_where_earlier_versions_save_it(tmp_path):
    """Their folders list no modules."""
    folder, name = save_base(tmp_path, 1), "torch.nn.modules.linear.Identity"
    assert load_source(folder).output_meaning.problem_type == MULTI_LABEL
    config = json.loads((folder / "config.json").read_text())
    for place in (
        {"sbert_ce_default_activation_function": name},
        {"sentence_transformers": {"activation_fn": name, "version": "4.1.0"}},
    ):
        (folder / "config.json").write_text(json.dumps(config | place))
        assert load_source(folder).output_meaning.problem_type == REGRESSION
        model = sentence_transformers.CrossEncoder(str(folder), device="cpu")
        assert isinstance(model.activation_fn, nn.Identity)


def test_cross_encoders_that_a_file_cannot_hold_raise_source_error(tmp_path):
    model, folder = save(tmp_path, 1, nn.LeakyReLU(0.3))
    with pytest.raises(
        SourceError, match=r"LeakyReLU\(negative_slope=0.3\) gives other numbers than the one of its na"
    ):
        export(model, tmp_path / "x.onnx")
    options = json.loads((folder / OPTIONS).read_text())
    for change, message in (
        ({"activation_fn": "custom.Swish"}, "names the activation custom.Swish of scores, which is not of torch.nn"),
        ({"default_prompt_name": "ask", "prompts": {"ask": "is "}}, "holds a CrossEncoder with a default prompt"),
    ):
        (folder / OPTIONS).write_text(json.dumps(options | change))
        with pytest.raises(SourceError, match=message):
            load_source(folder)
    (folder / OPTIONS).write_text(json.dumps(options))
    modules = json.loads((folder / "modules.json").read_text())
    scorer = {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}
    (folder / "modules.json").write_text(json.dumps([*modules, scorer]))
    with pytest.raises(SourceError, match="holds a CrossEncoder with a module LogitScore, which is not supported"):
        load_source(folder)
