"""Exported encoders match transformers' tokenizer, padding and logits, on texts and pairs.

Each family is exported once, with its kind of tokenizer over a tiny vocabulary.
"""

from __future__ import annotations

import functools
import json
import re
import sys

import numpy as np
import pytest
import torch
import transformers
from support.text_models import SHAPE as SIZES
from support.text_models import byte_pairs, unigram_pieces, wordpiece_vocabulary
from transformers import BertTokenizer, DebertaTokenizer, DebertaV2Tokenizer, DistilBertTokenizer, RobertaTokenizer

from tformer_export import export
from tformer_export.cli import main
from tformer_export.sources import load_source
from tformer_export.sources.hugging_face.single_pass import from_text_model
from tformer_export.sources.task_names import CLASSIFIES, task_of_class
from tformer_runtime import Model, SourceError
from tformer_runtime.format import manifest as m
from tformer_runtime.tasks import Classifier

SHAPE = dict(**SIZES, id2label={0: "bad", 1: "so so", 2: "good"}, label2id={"bad": 0, "so so": 1, "good": 2})
TEXTS = ["the film was good", "a very old model reads the new file and it is not bad", "we", "Bad night!", "", "é 你"]
PAIRS = [("the film was good", "a day"), ("we", "the old night was not very good and the new film is bad"), ("", "it")]
LONG = "the old film " * 30


FAMILIES = {
    "bert": lambda: (
        transformers.BertForSequenceClassification,
        transformers.BertConfig(**SHAPE, vocab_size=len(wordpiece_vocabulary())),
        BertTokenizer(vocab=wordpiece_vocabulary()),
    ),
    "roberta": lambda: (
        transformers.RobertaForSequenceClassification,
        transformers.RobertaConfig(**SHAPE, vocab_size=270, pad_token_id=1, type_vocab_size=1),
        RobertaTokenizer(**byte_pairs("<s>", "<pad>", "</s>", "<unk>", "<mask>")),
    ),
    "distilbert": lambda: (
        transformers.DistilBertForSequenceClassification,
        transformers.DistilBertConfig(
            vocab_size=len(wordpiece_vocabulary()),
            dim=32, n_layers=1, n_heads=4, hidden_dim=48, max_position_embeddings=40,
            initializer_range=0.3, id2label=SHAPE["id2label"], label2id=SHAPE["label2id"],
        ),
        DistilBertTokenizer(vocab=wordpiece_vocabulary()),
    ),
    "deberta": lambda: (
        transformers.DebertaForSequenceClassification,
        transformers.DebertaConfig(
            **SHAPE, vocab_size=270, relative_attention=True, pos_att_type="c2p|p2c", type_vocab_size=2
        ),
        DebertaTokenizer(**byte_pairs("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")),
    ),
    "deberta-v2": lambda: (
        transformers.DebertaV2ForSequenceClassification,
        transformers.DebertaV2Config(
            **SHAPE, vocab_size=len(unigram_pieces()) + 1,
            relative_attention=True, pos_att_type="c2p|p2c", position_buckets=8,
            share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0,
        ),
        DebertaV2Tokenizer(vocab=unigram_pieces(), unk_id=3),
    ),
}  # fmt: skip
TOKEN_TYPE_FAMILIES = {"bert", "deberta"}  # families whose results depend on token types


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function: family → module, tokenizer, model of the exported file, report."""

    @functools.cache
    def get(name):
        model_class, config, tokenizer = FAMILIES[name]()
        torch.manual_seed(3)
        module, folder = model_class(config).eval(), tmp_path_factory.mktemp(name)
        tokenizer.model_max_length = 38
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report = export(load_source(folder), folder / "model.onnx")
        return module, tokenizer, Model.load(folder / "model.onnx", "cpu", threads=1), report

    return get


def transformers_probabilities(module, tokenizer, samples):
    """Return transformers' probabilities for all samples in one padded batch."""
    first, second = zip(*((s, None) if isinstance(s, str) else s for s in samples), strict=True)
    texts = (list(first),) if second[0] is None else (list(first), list(second))
    inputs = tokenizer(*texts, padding=True, truncation=True, max_length=38, return_tensors="pt")
    with torch.no_grad():
        return module(**inputs).logits.double().softmax(-1).numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name == "deberta" else []) for name in FAMILIES]
)
def test_classes_of_texts_and_pairs_match_transformers(exported, name):
    module, tokenizer, model, report = exported(name)
    for samples in (TEXTS, PAIRS, [LONG, "we"], [(LONG, "we"), ("we", LONG), (LONG, LONG)]):
        expected = transformers_probabilities(module, tokenizer, samples)
        for batch_size in (1, 8):
            actual = model.classify(samples, batch_size=batch_size, truncate=True)
            scores = np.array([list(result.scores.values()) for result in actual])
            np.testing.assert_allclose(scores, expected, atol=2e-5)
            labels = [module.config.id2label[int(i)] for i in expected.argmax(1)]
            assert [result.label for result in actual] == labels
    encode = model.manifest.encode
    assert {spec.role for spec in encode.inputs} == {"ids", "mask"} | (
        {"types"} if name in TOKEN_TYPE_FAMILIES else set()
    )
    assert encode.ragged
    assert model.manifest.task == CLASSIFIES
    assert (report.parity.raw.texts, report.parity.raw.pairs) == (11, 4)
    assert report.parity.raw.relative < 1e-4


def test_folder_of_a_classifier_exports_as_a_sentence_encoder(exported, tmp_path, monkeypatch, capsys):
    """The command line exports it without its head, pooled and in int8. The reference is the module's states."""
    module, tokenizer, model, _ = exported("bert")
    folder, out = model.engine.session.path.parent, tmp_path / "x.onnx"
    options = ["--pooling", "mean", "--normalize", "--quantize", "int8", "--max-length", "30"]
    monkeypatch.setattr(sys, "argv", ["tformer-export", str(folder), "-o", str(out), *options])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    rows = dict(line.strip().split(None, 1) for line in capsys.readouterr().err.splitlines() if " " in line.strip())
    assert rows["cosine"].startswith("0.99")
    assert re.match(r"raw inputs +max \|Δ\| ", rows["from"])
    assert rows["from"].endswith("11 texts, 4 pairs")
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=30, return_tensors="pt")
    with torch.no_grad():
        states, keep = module.bert(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        expected = torch.nn.functional.normalize((states * keep).sum(1) / keep.sum(1), dim=1).numpy()
    actual = Model.load(out, "cpu").embed(TEXTS)
    assert (actual * expected).sum(1).min() > 0.995
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "problem_type"),
    [
        ({"num_labels": 3}, m.SINGLE_LABEL),
        ({"num_labels": 1}, m.MULTI_LABEL),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, m.MULTI_LABEL),
        ({"num_labels": 2, "problem_type": "regression"}, m.REGRESSION),
    ],
)
def test_problem_type_and_scores_match_the_pipeline(config, problem_type, tmp_path):
    shape = {name: value for name, value in SHAPE.items() if "label" not in name}
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**shape, vocab_size=29, **config))
    source = from_text_model(module.eval(), task_of_class(type(module)))
    assert source.output_meaning.problem_type == problem_type
    assert list(source.output_meaning.labels) == [module.config.id2label[i] for i in range(module.config.num_labels)]
    pipeline = transformers.TextClassificationPipeline(
        model=module, tokenizer=BertTokenizer(vocab=wordpiece_vocabulary())
    )
    expected = {entry["label"]: entry["score"] for entry in pipeline("the film was good", top_k=None)}
    with torch.no_grad():
        logits = module(torch.tensor([[2, 5, 9, 12, 7, 3]])).logits.numpy()
    result = Classifier(manifest_of(source)).result([logits[0]], {"top_k": 1})
    assert result.scores == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["model_input_names", "class"])
def test_model_has_its_default_for_token_types_that_the_tokenizer_does_not_return(kind, tmp_path):
    """The model reads types, so the second text of a pair would differ if the file gave it types."""
    model_class, config, tokenizer = FAMILIES["bert"]()
    torch.manual_seed(3)
    module = model_class(config).eval()
    module.save_pretrained(tmp_path)
    if kind == "class":
        DistilBertTokenizer(vocab=wordpiece_vocabulary()).save_pretrained(tmp_path)
    else:
        tokenizer.save_pretrained(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        names = {"model_input_names": ["input_ids", "attention_mask"]}
        path.write_text(json.dumps(json.loads(path.read_text()) | names))
    report = export(load_source(tmp_path), tmp_path / "model.onnx")
    model = Model.load(tmp_path / "model.onnx", "cpu", threads=1)
    pipeline = transformers.TextClassificationPipeline(
        model=module, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path)
    )
    pairs = [pair for pair in PAIRS if all(pair)]
    expected = pipeline([{"text": a, "text_pair": b} for a, b in pairs], top_k=None)
    for result, entries in zip(model.classify(pairs), expected, strict=True):
        assert result.scores == pytest.approx({entry["label"]: entry["score"] for entry in entries}, abs=2e-5)
    assert {spec.role for spec in model.manifest.encode.inputs} == {"ids", "mask"}
    assert report.parity.raw.pairs == 4


def manifest_of(source):
    return m.Manifest(task=source.task, max_length=0, encode=None, decode=None, output_meaning=source.output_meaning)


def test_max_length_excludes_reserved_positions():
    """Some families reserve the first positions for padding, so that the configured maximum is too large."""
    for name, max_length in (("bert", 40), ("roberta", 38)):
        model_class, config, _ = FAMILIES[name]()
        assert from_text_model(model_class(config).eval(), CLASSIFIES).max_length == max_length


def test_folder_of_an_unsupported_task_raises_source_error(tmp_path):
    config = transformers.BertConfig(**SHAPE, vocab_size=29)
    transformers.BertForNextSentencePrediction(config).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="it holds a BertForNextSentencePrediction, which serves none of the tasks"):
        load_source(tmp_path)
    assert load_source(tmp_path, task="feature-extraction").task == "feature-extraction"
