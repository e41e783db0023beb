"""Languages of Django's messages: the sides, and how classifiers of them are trained, asked and counted."""

import json
import random

import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import accuracy_score, recall_score
from tokenizers import Tokenizer

from tformer_export.common.checkpoint import InputError, OptionError, load_checkpoint, save_checkpoint
from tformer_models import languages
from tformer_models.data import Dataset
from tformer_models.encoder import SentenceClassifier
from tformer_models.g2p import SPLITS
from tformer_models.recipe import Output, Part, Recipe, Training
from tformer_models.training import train

SIZES = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_length": 16, "positions": "sinusoidal"}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_split_never_changes():
    counts = {side: len(languages.split(side)) for side in SPLITS}
    assert counts == {"train": 33366, "validation": 1611, "test": 1960}
    assert len(languages.messages()) == 72
    learned = set(languages.split("train"))
    assert len(learned) == counts["train"]
    for side in ("validation", "test"):
        assert not learned & set(languages.split(side))
        assert {language for _, language in languages.split(side)} == set(languages.messages())


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
def test_what_is_not_language_is_left_out(message, text):
    assert languages.clean(message) == text


def test_a_crop_is_a_run_of_words_of_a_text():
    texts = [("one two three four five six seven", "en"), ("eins zwei", "de"), ("a b c", "en")]
    draw = random.Random(0)
    found = [languages.cropped(texts, draw) for _ in range(50)]
    pieces = {piece for each in found for piece, _ in each}
    assert all(f" {piece} " in " one two three four five six seven " for piece in pieces)
    assert len(pieces) > 5
    assert "one two three four five six seven" not in pieces
    assert {language for each in found for _, language in each} == {"en"}
    kept = {piece for _ in range(50) for piece, _ in languages.cropped(texts, draw, {"two three four"})}
    assert "two three four" not in kept
    assert kept & pieces


def test_a_mixture_is_of_words_of_two_texts_of_a_language():
    texts = [("first second third fourth", "en"), ("fifth sixth seventh", "en"), ("erstes zweites drittes", "de")]
    pool = {"en": {*texts[0][0].split(), *texts[1][0].split()}, "de": set(texts[2][0].split())}
    seen = set()
    for seed in range(20):
        made = languages.mixed(texts, random.Random(seed))
        assert languages.mixed(texts, random.Random(seed)) == made
        assert [language for _, language in made] == ["en", "en", "de"]
        for (text, language), (own, _) in zip(made, texts, strict=True):
            assert len(text.split()) == len(own.split())
            assert set(text.split()) <= pool[language]
            seen.add(text)
    assert any({"first", "second"} & set(text.split()) and {"fifth", "sixth"} & set(text.split()) for text in seen)
    held = {text for text in seen if "erstes" in text}
    assert all(text not in held for text, _ in languages.mixed(texts, random.Random(3), held))


@pytest.mark.parametrize(
    ("locale", "language"), [("de", "de"), ("pt_BR", "pt"), ("zh_Hans", "zh-Hans"), ("sr_Latn", "sr-Latn")]
)
def test_a_language_has_its_script_and_no_region(locale, language):
    assert languages.language_of(locale) == language


def letters(rows: int = 120) -> Dataset:
    """Rows of one letter more often than the other, or less often: what a tiny model learns in seconds."""
    torch.manual_seed(5)
    drawn = [(torch.rand(7) < torch.rand(1)).long().tolist() for _ in range(rows)]
    pairs = [([1 + i for i in row], [int(sum(row) > 3)]) for row in drawn]
    return Dataset(
        pairs[20:], pairs[:20], {"vocabulary": 3, "labels": 2}, {}, {"start": [], "end": [], "pad": 0}, ["few", "many"]
    )


def recipe(**options):
    given = {"steps": 80, "validate_every": 40, "batch_tokens": 256, "warmup": 4, "learning_rate": 1e-2, "average": 0.9}
    return Recipe(
        data=Part("test_languages:letters"),
        model=Part("tformer_models.encoder:SentenceClassifier", SIZES | {"dropout": 0.0}),
        training=Training(**{**given, "monitor": "accuracy", **options}),
        checkpoint=Output(task="text-classification", max_length=16),
    )


def test_a_classifier_learns_and_the_checkpoint_says_all(tmp_path):
    held = load_checkpoint(train(recipe(), tmp_path / "run"))
    assert (held.step, held.labels, held.task) == (None, ["few", "many"], "text-classification")
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    model = held.build()
    right = [int(model(torch.tensor([row])).argmax()) == label for row, (label,) in letters().validation]
    assert sum(right) >= 18


def test_a_metric_of_something_else_is_refused(tmp_path):
    with pytest.raises(OptionError, match="with labels, whose metrics are loss, accuracy: not forecast_error"):
        train(recipe(monitor="forecast_error"), tmp_path / "run")


@pytest.fixture
def few(monkeypatch):
    """A test side of four texts in two languages, and a checkpoint whose tokenizer was learnt from another."""
    texts = [("Der Hund schläft heute", "de"), ("Die Katze schläft", "de"), ("The dog sleeps", "en"), ("No cat", "en")]
    monkeypatch.setattr(languages, "split", lambda side: texts)
    return texts


def test_predictions_are_the_models_own_in_the_order_of_the_texts(few, tmp_path):
    text = languages.tokenizer([text for text, _ in few], 280)
    arguments = {"vocabulary": 280, "labels": 2, **SIZES}
    torch.manual_seed(0)
    model = SentenceClassifier(**arguments).eval()
    path = tmp_path / "model.pt"
    save_checkpoint(
        model, path, factory="tformer_models.encoder:SentenceClassifier", arguments=arguments, tokenizer={"ids": text},
        task="text-classification", step=None, max_length=16, labels=["de", "en"],
    )  # fmt: skip
    ids = [Tokenizer.from_str(text).encode(t).ids[:16] for t, _ in few]
    expected = [["de", "en"][int(model(torch.tensor([row])).argmax())] for row in ids]
    assert languages.predict(path, [t for t, _ in few], batch_size=3) == expected
    out = CliRunner().invoke(languages.main, ["evaluate", str(path)]).output
    assert out.splitlines()[0] == languages.report("model.pt", expected, "test")
    assert out.splitlines()[1].startswith("naive Bayes: test, 4 texts of 2 languages")


def test_scores_are_counted_as_scikit_learn_does(few):
    found, right = ["de", "en", "en", "en"], [language for _, language in few]
    every, mean = accuracy_score(right, found), recall_score(right, found, average="macro")
    expected = f"the file: test, 4 texts of 2 languages, {every:.2%} right, {mean:.2%} by language"
    lines = "".join(json.dumps({"label": label}) + "\n" for label in found)
    assert CliRunner().invoke(languages.main, ["score"], input=lines).output.strip() == expected
    with pytest.raises(InputError, match="there are 3 predictions for the 4 texts of the test split"):
        languages.report("x", found[:3], "test")
    assert CliRunner().invoke(languages.main, ["texts"]).output.splitlines() == [text for text, _ in few]
