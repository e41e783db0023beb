"""Exported classifiers, sentence encoders and language models of tformer_models match their PyTorch modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from examples.training import languages, words
from tformer_export import Task, export
from tformer_export.cli import command as export_command
from tformer_export.common.checkpoint import save_checkpoint
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.factory import from_factory
from tformer_export.sources.torch_module import from_module
from tformer_models.encoder import SentenceClassifier, SentenceEncoder
from tformer_models.language_model import LanguageModel
from tformer_runtime import Model
from tformer_runtime.base.errors import OptionError
from tformer_runtime.cli.main import main as run_command

SIZES = {"width": 32, "heads": 4, "layers": 2, "feedforward": 48, "max_length": 24}
TEXTS = ["Die Katze schläft", "The dog", "Der Hund sieht heute die Katze nicht", "é 你"]
LABELS = ["de", "en", "fr"]


@pytest.fixture(scope="module")
def tokenizer():
    return languages.tokenizer(TEXTS, 300)


def random_model(model_class, *arguments, **options):
    """Return a model with seeded random weights."""
    torch.manual_seed(2)
    model = model_class(*arguments, **{**SIZES, **options}).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def rows(tokenizer):
    """Return the ids of each text, truncated to the model's length."""
    return [torch.tensor([Tokenizer.from_str(tokenizer).encode(text).ids[:24]]) for text in TEXTS]


def test_classifier_checkpoint_classifies_as_its_module(tokenizer, tmp_path):
    model = random_model(SentenceClassifier, 300, 3, positions="sinusoidal")
    arguments = {"vocabulary": 300, "labels": 3, **SIZES, "positions": "sinusoidal"}
    save_checkpoint(
        model, tmp_path / "model.pt", factory="tformer_models.encoder:SentenceClassifier", arguments=arguments,
        tokenizer={"ids": tokenizer}, task=Task("text-classification", labels=LABELS), step_input=None, max_length=24,
    )  # fmt: skip
    file = tmp_path / "model.onnx"
    result = CliRunner().invoke(export_command, [str(tmp_path / "model.pt"), "-o", str(file)])
    assert result.exit_code == 0, result.output
    run_result = CliRunner().invoke(run_command, [str(file), *TEXTS, "--json", "--truncate"])
    assert run_result.exit_code == 0, run_result.output
    actual = [json.loads(line) for line in run_result.stdout.splitlines()]
    with torch.inference_mode():
        expected = [model(ids)[0].softmax(-1).tolist() for ids in rows(tokenizer)]
    assert [list(line["scores"]) for line in actual] == [LABELS] * 4
    np.testing.assert_allclose([list(line["scores"].values()) for line in actual], expected, atol=1e-5)
    assert [line["label"] for line in actual] == [LABELS[int(np.argmax(row))] for row in expected]


def test_sentence_vectors_match_the_module_for_each_batch_size(tokenizer, tmp_path):
    model = random_model(SentenceEncoder, 300, pool="max", vector=8, normalize=True)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    export(
        model, tmp_path / "m.onnx", {"ids": ids}, None, tokenizer=tokenizer, task="feature-extraction",
        special_tokens={"pad_token_id": 0}, max_length=24,
    )  # fmt: skip
    file = Model.load(tmp_path / "m.onnx", device="cpu", threads=1)
    with torch.inference_mode():
        expected = np.concatenate([model(row).numpy() for row in rows(tokenizer)])
    for batch in (1, 4):
        np.testing.assert_allclose(file.embed(TEXTS, batch_size=batch, truncate=True), expected, atol=1e-5)


def test_language_model_greedy_tokens_match_whole_forward(tmp_path):
    model = random_model(LanguageModel, 40)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    export(
        model,
        tmp_path / "m.onnx",
        {"ids": ids},
        "ids",
        special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
        max_length=24,
    )
    file = Model.load(tmp_path / "m.onnx", device="cpu", threads=1)
    prompts = [[1, 5, 9, 7, 30], [1, 8], [1, 33, 12]]
    for prompt, result in zip(prompts, file.generate_batch(prompts, max_new_tokens=12), strict=True):
        expected_ids = list(prompt)
        with torch.inference_mode():
            while len(expected_ids) < len(prompt) + 12 and (len(expected_ids) == len(prompt) or expected_ids[-1] != 2):
                expected_ids.append(int(model(torch.tensor([expected_ids]))[0, -1].argmax()))
        assert list(result.token_ids) == expected_ids[len(prompt) :]


def test_chat_uses_the_template_of_the_checkpoint(tmp_path):
    """Two turns, on the command line and in Python, match the forward over the whole conversation."""
    size = len(words.vocabulary())
    sizes = {**SIZES, "positions": "sinusoidal", "max_length": 64}
    model = random_model(LanguageModel, size, **sizes)
    save_checkpoint(
        model, tmp_path / "model.pt", factory="tformer_models.language_model:LanguageModel",
        arguments={"vocabulary": size, **sizes}, tokenizer={"ids": words.tokenizer()},
        task="text-generation", step_input="ids", special_tokens={"bos_token_id": [], "eos_token_id": [words.END],
        "pad_token_id": words.PAD},
        chat_template=words.TEMPLATE, max_length=64,
    )  # fmt: skip
    file = tmp_path / "model.onnx"
    result = CliRunner().invoke(export_command, [str(tmp_path / "model.pt"), "-o", str(file)])
    assert result.exit_code == 0, result.output
    encode, decode = Tokenizer.from_str(words.tokenizer()).encode, Tokenizer.from_str(words.tokenizer()).decode

    def answer(prompt):
        ids = encode(prompt).ids
        first = len(ids)
        with torch.inference_mode():
            while len(ids) < first + 4 and (len(ids) == first or ids[-1] != words.END):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        return decode(ids[first:])

    first = answer("<user>cat<end><model>")
    second = answer(f"<user>cat<end><model>{first}<end><user>a rhyme<end><model>")
    messages = [("user", "cat"), ("assistant", first), ("user", "a rhyme")]
    conversation = [{"role": role, "content": text} for role, text in messages]
    run_result = CliRunner().invoke(
        run_command, [str(file), "--chat", "--max-new-tokens", "4", "--", "cat", json.dumps(conversation)]
    )
    assert run_result.exit_code == 0, run_result.output
    assert run_result.stdout.splitlines() == [first, second]
    chat = Model.load(file, device="cpu", threads=1).chat()
    assert [chat.send(text, max_new_tokens=4).text for text in ("cat", "a rhyme")] == [first, second]


def language_model():
    """Return a module, its example and its options, as a factory for tformer-export does."""
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    special_tokens = {"bos_token_id": [], "eos_token_id": [words.END], "pad_token_id": words.PAD}
    options = {"step_input": "ids", "tokenizer": words.tokenizer(), "special_tokens": special_tokens, "max_length": 24}
    return (
        random_model(LanguageModel, len(words.vocabulary())),
        {"ids": ids},
        {**options, "chat_template": words.TEMPLATE},
    )


def test_chat_template_flag_replaces_the_template_of_a_factory(tmp_path, monkeypatch):
    """The factory's template is read, and --chat-template replaces it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert from_factory("test_custom_models:language_model").chat_template == words.TEMPLATE
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    source, file = "test_custom_models:language_model", tmp_path / "m.onnx"
    result = CliRunner().invoke(
        export_command, [source, "-o", str(file), "--chat-template", str(tmp_path / "chat.jinja")]
    )
    assert result.exit_code == 0, result.output
    prompt = Model.load(file, "cpu", threads=1).prompt("K AE")
    assert prompt.tolist() == Tokenizer.from_str(words.tokenizer()).encode("K AE").ids


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "the chat template cannot be read: "),
        ("", "the chat template is empty: "),
        ({"default": "{{ messages }}"}, "the chat template is of type dict: "),
        ("{{ bos_token }}{{ messages[0].content }}", "the chat template uses bos_token, whose text is unknown"),
    ],
)
def test_invalid_chat_template_raises_option_error(tmp_path, template, sentence):
    model, example, options = language_model()
    with pytest.raises(OptionError, match=sentence):
        export(model, tmp_path / "n.onnx", example, **{**options, "chat_template": template})
    with pytest.raises(OptionError, match=sentence):
        with_template(from_module(model, example, "ids"), template)
    assert not (tmp_path / "n.onnx").exists()


def test_chat_template_without_tokenizer_or_step_input_raises_option_error(tmp_path):
    model, example, options = language_model()
    with pytest.raises(OptionError, match="a chat template needs a tokenizer: give one"):
        export(model, tmp_path / "n.onnx", example, **{**options, "tokenizer": None})
    with pytest.raises(OptionError, match="continues a text, but this model is a single-pass model"):
        export(model, tmp_path / "n.onnx", example, **{**options, "step_input": None})
    with pytest.raises(OptionError, match="chat_template of a checkpoint must be Jinja text, not dict"):
        save_checkpoint(model, tmp_path / "m.pt", factory="a:b", arguments={}, chat_template={})
    assert list(tmp_path.iterdir()) == []
