"""Conversations about words: what is taught, how it becomes ids, how a model learns it, and how answers are counted."""

import csv
import itertools
import json
import math
import random

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from tformer_export.common.checkpoint import InputError, load_checkpoint
from tformer_models import g2p, words
from tformer_models.language_model import LanguageModel
from tformer_models.recipe import Output, Part, Recipe, Training
from tformer_models.training import train
from tformer_runtime.preprocess.chat_template import compiled, conversation


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(words.tokenizer())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("cat's", ["▁", "c", "a", "t", "'", "s"]),
        ("K AE T", ["▁K", "▁AE", "▁T"]),
        (words.RHYME, ["▁", "a", "▁", "r", "h", "y", "m", "e"]),
    ],
)
def test_words_are_read_by_letter_and_phonemes_whole(tokenizer, text, tokens):
    encoding = tokenizer.encode(text)
    assert encoding.tokens == tokens
    assert words.UNKNOWN not in encoding.ids
    assert tokenizer.decode(encoding.ids) == text


def test_what_is_neither_is_unknown(tokenizer):
    assert all(words.UNKNOWN in tokenizer.encode(text).ids for text in ("Cat", "3", "é", "AEK"))


@pytest.mark.parametrize("word", ["cat", "transformer", "knight"])
def test_what_is_taught_rhymes(word):
    other = words.rhyme(word)
    assert other is not None
    assert g2p.split_of(other) == "train"
    assert other != word
    assert words.endings()[other] == words.endings()[word]
    assert not [w for w in words.rhyming()[words.endings()[word]] if len(w) < len(other) and w != word]


def test_endings_begin_with_the_vowel_of_the_last_main_stress():
    assert [words.endings()[word] for word in ("cat", "hello", "photography")] == ["AE T", "OW", "AA G R AH F IY"]
    assert words.rhyme("zzzz") is None


def test_each_word_is_said_and_spelt_once_and_what_follows_is_of_it():
    chosen = list(words.split("test"))[:300]
    talks = words.conversed(chosen, random.Random(3))
    assert words.conversed(chosen, random.Random(3)) == talks
    exchanges = [exchange for talk in talks for exchange in talk if exchange[0] != words.RHYME]
    assert sorted(message for message, _ in exchanges if message.islower()) == chosen
    assert sorted(answer for message, answer in exchanges if not message.islower()) == chosen
    for message, answer in exchanges:
        word, said = (message, answer) if message.islower() else (answer, message)
        assert tuple(said.split()) in g2p.lexicon()[word]
    rhymes = 0
    for talk in talks:
        assert 1 <= sum(message != words.RHYME for message, _ in talk) <= 3
        for (asked, answered), (message, answer) in itertools.pairwise(talk):
            if message == words.RHYME:
                rhymes += 1
                assert answer == words.rhyme(asked if asked.islower() else answered)
    assert rhymes > 50


def test_answers_are_learned_and_messages_are_not(tokenizer):
    talk = [("cat", "K AE T"), (words.RHYME, "bat")]
    ((ids, wanted),) = words.pairs([talk], words.tokenizer())
    messages = [
        {"role": role, "content": text}
        for exchange in talk
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    whole = compiled(words.TEMPLATE, {})(messages).removesuffix("<model>")
    assert tokenizer.encode(whole).ids == [*ids, words.END]
    prompt = compiled(words.TEMPLATE, {})(conversation("cat"))
    first = len(tokenizer.encode(prompt).ids)
    answer = [*tokenizer.encode("K AE T").ids, words.END]
    assert wanted[: first - 1] == [words.PAD] * (first - 1)
    assert wanted[first - 1 : first + 3] == answer
    assert wanted[first + 3] == words.PAD
    assert [token for token in wanted if token != words.PAD] == [*answer, *tokenizer.encode("bat").ids, words.END]


def test_the_template_knows_users_and_assistants():
    with pytest.raises(InputError, match="it has users and assistants, and no system"):
        compiled(words.TEMPLATE, {})(conversation("cat", "be kind"))


def test_a_language_model_learns_by_a_recipe(tmp_path):
    sizes = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_length": 256, "dropout": 0.0}
    recipe = Recipe(
        data=Part("tformer_models.words:dataset", {"passes": 1, "limit": 40}),
        model=Part("tformer_models.language_model:LanguageModel", sizes),
        training=Training(steps=120, validate_every=40, batch_tokens=512, warmup=5, learning_rate=1e-2),
        checkpoint=Output(task="text-generation", max_length=256),
    )
    loaded = load_checkpoint(train(recipe, tmp_path / "run"))
    assert (loaded.step, loaded.chat_template, loaded.task) == ("ids", words.TEMPLATE, "text-generation")
    assert loaded.special == {"start": [], "end": [words.END], "pad": words.PAD}
    model = loaded.build()
    assert isinstance(model, LanguageModel)
    with (tmp_path / "run" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * math.log(len(words.vocabulary()))
    # The loss is of what is to be said, and of nothing else: here of each conversation alone, without padding.
    scored: list[float] = []
    with torch.inference_mode():
        for ids, wanted in words.dataset(passes=1, limit=40).validation:
            scores = model(torch.tensor([ids]))[0].log_softmax(-1)
            scored += [-float(scores[t, token]) for t, token in enumerate(wanted) if token != words.PAD]
    assert sum(scored) / len(scored) == pytest.approx(losses[-1], rel=1e-5)


def test_answers_are_counted():
    asked = list(words.asked("test"))
    right = {"said": lambda w: " ".join(g2p.lexicon()[w][0]), "spelt": lambda w: w, "rhymed": words.rhyme}
    answers = [right[what](word) for what, word, _ in asked]
    said = sum(what == "said" for what, *_ in asked)
    everything = f"test: {said} words, PER 0.00%, WER 0.00%; a word that is said so 100.00%; a word that rhymes 100.00%"
    assert words.report(answers, "test") == everything
    wrong = [word if what == "rhymed" else "" for what, word, _ in asked]
    assert words.report(wrong, "test").endswith(
        "PER 100.00%, WER 100.00%; a word that is said so 0.00%; a word that rhymes 0.00%"
    )
    with pytest.raises(InputError, match=f"there are 1 answers for the {len(asked)} conversations of the test split"):
        words.report([""], "test")
    printed = CliRunner().invoke(words.main, ["messages"])
    assert [json.loads(line) for line in printed.output.splitlines()] == [talk for *_, talk in asked]
    assert CliRunner().invoke(words.main, ["score"], "\n".join(answers)).output == everything + "\n"
