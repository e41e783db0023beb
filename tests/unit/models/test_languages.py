"""The languages benchmark: splits are fixed, augmentation keeps labels, and scores equal scikit-learn's."""

import json
import random

import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import accuracy_score, recall_score
from tokenizers import Tokenizer

from examples.training import languages
from examples.training.g2p import SPLITS
from tformer_export import Task
from tformer_export.common.checkpoint import load_checkpoint, save_checkpoint
from tformer_models.data import Dataset
from tformer_models.encoder import SentenceClassifier
from tformer_models.recipe import CheckpointOptions, FactoryCall, Recipe, TrainingOptions
from tformer_models.training import train
from tformer_runtime.base.errors import InputError, OptionError

SIZES = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_length": 16, "positions": "sinusoidal"}


@pytest.fixture(autouse=True)
def single_torch_thread():
    """Use one thread, so that sums have one order and training is reproducible."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_split_is_fixed():
    counts = {split: len(languages.load_split(split)) for split in SPLITS}
    assert counts == {"train": 33366, "validation": 1611, "test": 1960}
    assert len(languages.load_messages()) == 72
    train_texts = set(languages.load_split("train"))
    assert len(train_texts) == counts["train"]
    for split in ("validation", "test"):
        assert not train_texts & set(languages.load_split(split))
        assert {language for _, language in languages.load_split(split)} == set(languages.load_messages())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Please enter  a <b>valid</b>\n value&hellip;", "Please enter a valid value"),
        ("%(count)d of %s objects, %(size).1f of it", "of objects, of it"),
        ("{start} – {end} of the list", "– of the list"),
        ("Mot de passe\u0301 change\u0301", "Mot de passé changé"),
        ("Yes", ""),
        ("1234567890 %% 12", ""),
        ("项目已被删除", "项目已被删除"),
    ],
)
def test_clean_text_removes_placeholders_and_short_texts(message, text):
    assert languages.clean_text(message) == text


def test_crop_is_a_run_of_words_of_one_text():
    texts = [("one two three four five six seven", "en"), ("eins zwei", "de"), ("a b c", "en")]
    rng = random.Random(0)
    crops = [languages.crop_texts(texts, rng) for _ in range(50)]
    pieces = {piece for crop in crops for piece, _ in crop}
    assert all(f" {piece} " in " one two three four five six seven " for piece in pieces)
    assert len(pieces) > 5
    assert "one two three four five six seven" not in pieces
    assert {language for crop in crops for _, language in crop} == {"en"}
    others = {piece for _ in range(50) for piece, _ in languages.crop_texts(texts, rng, {"two three four"})}
    assert "two three four" not in others
    assert others & pieces


def test_mixture_has_words_of_two_texts_of_one_language():
    texts = [("first second third fourth", "en"), ("fifth sixth seventh", "en"), ("erstes zweites drittes", "de")]
    pool = {"en": {*texts[0][0].split(), *texts[1][0].split()}, "de": set(texts[2][0].split())}
    mixed_texts = set()
    for seed in range(20):
        mixtures = languages.mix_texts(texts, random.Random(seed))
        assert languages.mix_texts(texts, random.Random(seed)) == mixtures
        assert [language for _, language in mixtures] == ["en", "en", "de"]
        for (text, language), (original, _) in zip(mixtures, texts, strict=True):
            assert len(text.split()) == len(original.split())
            assert set(text.split()) <= pool[language]
            mixed_texts.add(text)
    assert any(
        {"first", "second"} & set(text.split()) and {"fifth", "sixth"} & set(text.split()) for text in mixed_texts
    )
    held_out = {text for text in mixed_texts if "erstes" in text}
    assert all(text not in held_out for text, _ in languages.mix_texts(texts, random.Random(3), held_out))


@pytest.mark.parametrize(
    ("locale", "language"), [("de", "de"), ("pt_BR", "pt"), ("zh_Hans", "zh-Hans"), ("sr_Latn", "sr-Latn")]
)
def test_language_has_its_script_and_no_region(locale, language):
    assert languages.language_of(locale) == language


def letters(num_rows: int = 120) -> Dataset:
    """Return rows of two letters, labelled by the more frequent one; a tiny model learns them in seconds."""
    torch.manual_seed(5)
    bits = [(torch.rand(7) < torch.rand(1)).long().tolist() for _ in range(num_rows)]
    pairs = [([1 + i for i in row], [int(sum(row) > 3)]) for row in bits]
    return Dataset(
        train=pairs[20:],
        validation=pairs[:20],
        model_arguments={"vocabulary": 3, "labels": 2},
        special_tokens={"bos_token_id": [], "eos_token_id": [], "pad_token_id": 0},
        labels=["few", "many"],
    )


def recipe(**options):
    """Return a recipe with changed training options."""
    defaults = {
        "steps": 80,
        "validate_every": 40,
        "batch_tokens": 256,
        "warmup": 4,
        "learning_rate": 1e-2,
        "average": 0.9,
    }
    return Recipe(
        data=FactoryCall("test_languages:letters"),
        model=FactoryCall("tformer_models.encoder:SentenceClassifier", SIZES | {"dropout": 0.0}),
        training=TrainingOptions(**{**defaults, "monitor": "accuracy", **options}),
        checkpoint=CheckpointOptions(task="text-classification", max_length=16),
    )


def test_classifier_learns_and_its_checkpoint_is_complete(tmp_path):
    loaded = load_checkpoint(train(recipe(), tmp_path / "run"))
    assert (loaded.step_input, loaded.labels, loaded.task) == (None, ["few", "many"], "text-classification")
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    model = loaded.build()
    correct = [int(model(torch.tensor([row])).argmax()) == label for row, (label,) in letters().validation]
    assert sum(correct) >= 18


def test_metric_of_another_model_kind_is_refused(tmp_path):
    with pytest.raises(
        OptionError, match="ids with labels, with the metrics loss, accuracy: monitor cannot be forecast_error"
    ):
        train(recipe(monitor="forecast_error"), tmp_path / "run")


@pytest.fixture
def four_texts(monkeypatch):
    """Replace every split by four texts in two languages."""
    texts = [("Der Hund schläft heute", "de"), ("Die Katze schläft", "de"), ("The dog sleeps", "en"), ("No cat", "en")]
    monkeypatch.setattr(languages, "load_split", lambda split: texts)
    return texts


def test_predictions_match_the_model_in_the_order_of_the_texts(four_texts, tmp_path):
    definition = languages.tokenizer([text for text, _ in four_texts], 280)
    arguments = {"vocabulary": 280, "labels": 2, **SIZES}
    torch.manual_seed(0)
    model = SentenceClassifier(**arguments).eval()
    path = tmp_path / "model.pt"
    save_checkpoint(
        model, path, factory="tformer_models.encoder:SentenceClassifier", arguments=arguments,
        tokenizer={"ids": definition}, task=Task("text-classification", labels=["de", "en"]), step_input=None,
        max_length=16,
    )  # fmt: skip
    ids = [Tokenizer.from_str(definition).encode(t).ids[:16] for t, _ in four_texts]
    expected = [["de", "en"][int(model(torch.tensor([row])).argmax())] for row in ids]
    assert languages.predict(path, [t for t, _ in four_texts], batch_size=3) == expected
    output = CliRunner().invoke(languages.main, ["evaluate", str(path)]).output
    assert output.splitlines()[0] == languages.format_report("model.pt", expected, "test")
    assert output.splitlines()[1].startswith("naive Bayes: test, 4 texts of 2 languages")


def test_accuracies_match_scikit_learn(four_texts):
    predictions, targets = ["de", "en", "en", "en"], [language for _, language in four_texts]
    accuracy, mean = accuracy_score(targets, predictions), recall_score(targets, predictions, average="macro")
    expected = f"the file: test, 4 texts of 2 languages, accuracy {accuracy:.2%}, mean over languages {mean:.2%}"
    lines = "".join(json.dumps({"label": label}) + "\n" for label in predictions)
    assert CliRunner().invoke(languages.main, ["score"], input=lines).output.strip() == expected
    with pytest.raises(InputError, match="there are 3 predictions for the 4 texts of the test split"):
        languages.format_report("x", predictions[:3], "test")
    assert CliRunner().invoke(languages.main, ["texts"]).output.splitlines() == [text for text, _ in four_texts]
