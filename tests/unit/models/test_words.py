"""The words model: conversations have correct answers, the loss counts answers only, and scores count right answers."""

import csv
import itertools
import json
import math
import random

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

from examples.training import g2p, words
from tformer_export.common.checkpoint import load_checkpoint
from tformer_models.language_model import LanguageModel
from tformer_models.recipe import CheckpointOptions, FactoryCall, Recipe, TrainingOptions
from tformer_models.training import train
from tformer_runtime.base.errors import InputError
from tformer_runtime.preprocess.chat_template import compile_template, conversation


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(words.tokenizer())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("cat's", ["▁", "c", "a", "t", "'", "s"]),
        ("K AE T", ["▁K", "▁AE", "▁T"]),
        (words.RHYME_REQUEST, ["▁", "a", "▁", "r", "h", "y", "m", "e"]),
    ],
)
def test_tokenizer_reads_words_as_letters_and_phonemes_whole(tokenizer, text, tokens):
    encoding = tokenizer.encode(text)
    assert encoding.tokens == tokens
    assert words.UNKNOWN not in encoding.ids
    assert tokenizer.decode(encoding.ids) == text


def test_tokenizer_maps_other_texts_to_unk(tokenizer):
    assert all(words.UNKNOWN in tokenizer.encode(text).ids for text in ("Cat", "3", "é", "AEK"))


@pytest.mark.parametrize("word", ["cat", "transformer", "knight"])
def test_rhyme_is_the_shortest_training_word_with_the_same_ending(word):
    rhyme = words.find_rhyme(word)
    assert rhyme is not None
    assert g2p.assign_split(rhyme) == "train"
    assert rhyme != word
    assert words.rhyme_parts()[rhyme] == words.rhyme_parts()[word]
    assert not [w for w in words.rhyming_words()[words.rhyme_parts()[word]] if len(w) < len(rhyme) and w != word]


def test_rhyme_part_begins_with_the_last_vowel_of_primary_stress():
    assert [words.rhyme_parts()[word] for word in ("cat", "hello", "photography")] == ["AE T", "OW", "AA G R AH F IY"]
    assert words.find_rhyme("zzzz") is None


def test_conversations_pronounce_and_spell_each_word_once():
    test_words = list(words.load_split("test"))[:300]
    talks = words.make_conversations(test_words, random.Random(3))
    assert words.make_conversations(test_words, random.Random(3)) == talks
    exchanges = [exchange for talk in talks for exchange in talk if exchange[0] != words.RHYME_REQUEST]
    assert sorted(message for message, _ in exchanges if message.islower()) == test_words
    assert sorted(answer for message, answer in exchanges if not message.islower()) == test_words
    for message, answer in exchanges:
        word, pronunciation = (message, answer) if message.islower() else (answer, message)
        assert tuple(pronunciation.split()) in g2p.load_lexicon()[word]
    num_rhymes = 0
    for talk in talks:
        assert 1 <= sum(message != words.RHYME_REQUEST for message, _ in talk) <= 3
        for (last_message, last_answer), (message, answer) in itertools.pairwise(talk):
            if message == words.RHYME_REQUEST:
                num_rhymes += 1
                assert answer == words.find_rhyme(last_message if last_message.islower() else last_answer)
    assert num_rhymes > 50


def test_targets_are_answers_and_not_messages(tokenizer):
    talk = [("cat", "K AE T"), (words.RHYME_REQUEST, "bat")]
    ((ids, targets),) = words.make_pairs([talk], words.tokenizer())
    messages = [
        {"role": role, "content": text}
        for exchange in talk
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    conversation_text = compile_template(words.TEMPLATE, {})(messages).removesuffix("<model>")
    assert tokenizer.encode(conversation_text).ids == [*ids, words.END]
    prompt = compile_template(words.TEMPLATE, {})(conversation("cat"))
    prompt_length = len(tokenizer.encode(prompt).ids)
    answer = [*tokenizer.encode("K AE T").ids, words.END]
    assert targets[: prompt_length - 1] == [words.PAD] * (prompt_length - 1)
    assert targets[prompt_length - 1 : prompt_length + 3] == answer
    assert targets[prompt_length + 3] == words.PAD
    assert [token for token in targets if token != words.PAD] == [*answer, *tokenizer.encode("bat").ids, words.END]


def test_chat_template_refuses_other_roles():
    with pytest.raises(InputError, match="it has users and assistants, and no system"):
        compile_template(words.TEMPLATE, {})(conversation("cat", "be kind"))


def test_language_model_learns_by_a_recipe(tmp_path):
    sizes = {"width": 16, "heads": 2, "layers": 1, "feedforward": 32, "max_length": 256, "dropout": 0.0}
    recipe = Recipe(
        data=FactoryCall("examples.training.words:dataset", {"passes": 1, "limit": 40}),
        model=FactoryCall("tformer_models.language_model:LanguageModel", sizes),
        training=TrainingOptions(steps=120, validate_every=40, batch_tokens=512, warmup=5, learning_rate=1e-2),
        checkpoint=CheckpointOptions(task="text-generation", max_length=256),
    )
    loaded = load_checkpoint(train(recipe, tmp_path / "run"))
    assert (loaded.step_input, loaded.chat_template, loaded.task) == ("ids", words.TEMPLATE, "text-generation")
    assert loaded.special_tokens == {"bos_token_id": [], "eos_token_id": [words.END], "pad_token_id": words.PAD}
    model = loaded.build()
    assert isinstance(model, LanguageModel)
    with (tmp_path / "run" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * math.log(len(words.vocabulary()))
    # The loss counts the targets only. The expected loss is computed for each conversation alone, without padding.
    token_losses: list[float] = []
    with torch.inference_mode():
        for ids, targets in words.dataset(passes=1, limit=40).validation:
            scores = model(torch.tensor([ids]))[0].log_softmax(-1)
            token_losses += [-float(scores[t, token]) for t, token in enumerate(targets) if token != words.PAD]
    assert sum(token_losses) / len(token_losses) == pytest.approx(losses[-1], rel=1e-5)


def test_report_counts_right_answers():
    conversations = list(words.evaluation_conversations("test"))
    solve = {"pronounce": lambda w: " ".join(g2p.load_lexicon()[w][0]), "spell": lambda w: w, "rhyme": words.find_rhyme}
    answers = [solve[request](word) for request, word, _ in conversations]
    word_count = sum(request == "pronounce" for request, *_ in conversations)
    all_right = f"test: {word_count} words, PER 0.00%, WER 0.00%; right spellings 100.00%; right rhymes 100.00%"
    assert words.format_report(answers, "test") == all_right
    wrong = [word if request == "rhyme" else "" for request, word, _ in conversations]
    assert words.format_report(wrong, "test").endswith(
        "PER 100.00%, WER 100.00%; right spellings 0.00%; right rhymes 0.00%"
    )
    with pytest.raises(
        InputError, match=f"there are 1 answers for the {len(conversations)} conversations of the test split"
    ):
        words.format_report([""], "test")
    printed = CliRunner().invoke(words.main, ["messages"])
    assert [json.loads(line) for line in printed.output.splitlines()] == [messages for *_, messages in conversations]
    assert CliRunner().invoke(words.main, ["score"], "\n".join(answers)).output == all_right + "\n"
