"""Text → the language that it is written in, learnt from Django's message catalogues: one text in 72 languages.

A language is a subtag of BCP 47, with its script where it is written in two; regional variants are one language. What
is not language is taken out of a message: placeholders, HTML. Messages are split 90/5/5 by a hash of the English one,
so a message is on one side in all languages; a text of the training side is on no other.

    python -m tformer_models.languages texts --split test     the texts of one side, one a line
    python -m tformer_models.languages score RESULTS.json     what `tformer-run --json` made of these
    python -m tformer_models.languages evaluate MODEL.pt      the checkpoint, and naive Bayes over characters
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from tformer_export.common.checkpoint import InputError, MissingExtraError, TformerError, load_checkpoint
from tformer_models.g2p import SIDE, split_of

if TYPE_CHECKING:
    from tformer_models.data import Dataset

NO_LANGUAGE = re.compile(r"%\(\w+\)[\d.]*[a-z]|%[a-z%]|\{[^{}]*\}|<[^<>]*>|&\w+;|\s+")
SOURCE = "en"  # what messages are translated from
FEWEST = 300  # messages that a language is kept with
SHORTEST = 12  # bytes of UTF-8, and LETTERS letters: less does not tell a language
LETTERS = 4
PAD = 0

Texts = list[tuple[str, str]]  # (text, language)


@functools.cache
def messages() -> dict[str, dict[str, frozenset[str]]]:
    """Language → English message → its texts in that language, of all catalogues."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for language, english, text in _translations():
        for name, written in ((language, text), (SOURCE, english)):
            if (cleaned := clean(written)) and (name == SOURCE or cleaned != clean(english)):
                found[name][english].add(cleaned)
    return {
        language: {english: frozenset(texts) for english, texts in sorted(of.items())}
        for language, of in sorted(found.items())
        if len(of) >= FEWEST
    }


def _translations() -> Iterator[tuple[str, str, str]]:
    """(language, English message, its translation)"""
    try:
        from babel.messages.mofile import read_mo
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package babel is not installed: pip install 'tformer[train]'") from error
    django = find_spec("django")
    if django is None or not django.submodule_search_locations:
        raise MissingExtraError("the package django is not installed: pip install 'tformer[train]'")
    for path in sorted(Path(django.submodule_search_locations[0]).rglob("*.mo")):
        language = language_of(path.parent.parent.name)
        with path.open("rb") as file:
            for message in read_mo(file):
                english, text = _singular(message.id), _singular(message.string)
                if english and text:
                    yield language, english, text


def _singular(said: str | Sequence[str] | None) -> str:
    """Of a message that has forms for numbers, the first."""
    return said if isinstance(said, str) else (said or ("",))[0]


def language_of(locale: str) -> str:
    """zh_Hans → zh-Hans, pt_BR → pt"""
    language, _, rest = locale.partition("_")
    return f"{language}-{rest}" if re.fullmatch("[A-Z][a-z]{3}", rest) else language


def clean(message: str) -> str:
    """The message's language, between single spaces; "" for too little of it."""
    text = " ".join(NO_LANGUAGE.sub(" ", unicodedata.normalize("NFC", message)).split())
    enough = len(text.encode()) >= SHORTEST and sum(map(str.isalpha, text)) >= LETTERS
    return text if enough else ""


@functools.cache
def split(side: str) -> Texts:
    """The texts of one side, by language and then by the alphabet."""
    texts = {
        language: {text for english, found in of.items() if split_of(english) == side for text in found}
        for language, of in messages().items()
    }
    if side != "train":
        learned = set(split("train"))
        texts = {language: {t for t in found if (t, language) not in learned} for language, found in texts.items()}
    return [(text, language) for language, found in texts.items() for text in sorted(found)]


def dataset(vocabulary: int = 6000, longest: int = 128, crops: int = 1, mixes: int = 4, seed: int = 1) -> Dataset:
    """The data factory of the recipe. vocabulary: byte pairs. longest: tokens of a text, behind which it is cut.

    A text is learned from as it will be read, and as many runs of its words as `crops`, drawn by the seed; and there
    are as many texts again as `mixes`, of words that are drawn from two of a language each: what tells it are its words
    and pieces, each of them, and few texts learned by heart would not do.
    """
    from tokenizers import Tokenizer

    from tformer_models.data import Dataset

    learned, draw = split("train"), random.Random(seed)
    held_out = {text for side in ("validation", "test") for text, _ in split(side)}
    text = tokenizer([text for text, _ in learned], vocabulary)
    labels = list(messages())

    encode = Tokenizer.from_str(text).encode

    def pairs(texts: Texts) -> list[tuple[list[int], list[int]]]:
        return [(encode(text).ids[:longest], [labels.index(language)]) for text, language in texts]

    return Dataset(
        train=[
            *pairs(learned),
            *(pair for _ in range(crops) for pair in pairs(cropped(learned, draw, held_out))),
            *(pair for _ in range(mixes) for pair in pairs(mixed(learned, draw, held_out))),
        ],
        validation=pairs(split("validation")),
        model_arguments={"vocabulary": Tokenizer.from_str(text).get_vocab_size(), "labels": len(labels)},
        tokenizers={"ids": text},
        special={"start": [], "end": [], "pad": PAD},
        labels=labels,
    )


def cropped(texts: Texts, draw: random.Random, held_out: Set[str] = frozenset()) -> Texts:
    """A run of the words of each text, of those that have three or more, if it is long enough to tell a language and
    not among those that are held out."""
    found = []
    for text, language in texts:
        words = text.split()
        if len(words) < 3:
            continue
        count = draw.randint(2, len(words) - 1)
        first = draw.randint(0, len(words) - count)
        found.append((" ".join(words[first : first + count]), language))
    return _learnable(found, held_out)


def mixed(texts: Texts, draw: random.Random, held_out: Set[str] = frozenset()) -> Texts:
    """As many texts as are given, each of as many words as one of them has, drawn from it and another of its language,
    if it is long enough to tell a language and not among those that are held out."""
    of: dict[str, list[str]] = defaultdict(list)
    for text, language in texts:
        of[language].append(text)
    found = []
    for text, language in texts:
        words = text.split()
        both = [*words, *draw.choice(of[language]).split()]
        found.append((" ".join(draw.sample(both, len(words))), language))
    return _learnable(found, held_out)


def _learnable(texts: Texts, held_out: Set[str]) -> Texts:
    """Those that are long enough to tell a language, and not held out."""
    cleaned = ((clean(text), language) for text, language in texts)
    return [(text, language) for text, language in cleaned if text and text not in held_out]


def tokenizer(texts: Sequence[str], vocabulary: int) -> str:
    """Byte pairs learnt from texts, as tokenizers' JSON. There is nothing that it cannot read."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return made.to_str()


def predict(checkpoint: Path, texts: Sequence[str], batch_size: int = 256) -> list[str]:
    """The languages of `texts`, in their order, by PyTorch from a model.pt."""
    import torch
    from tokenizers import Tokenizer

    from tformer_models.data import pad_rows

    loaded = load_checkpoint(checkpoint)
    if not loaded.labels:
        raise InputError(f"{checkpoint} has no labels: it does not classify")
    model = loaded.build()
    encode = Tokenizer.from_str(loaded.tokenizers["ids"]).encode
    rows = [encode(text).ids[: loaded.max_length] for text in texts]
    found: dict[int, str] = {}
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with torch.inference_mode():
        for first in range(0, len(rows), batch_size):
            chosen = by_length[first : first + batch_size]
            best = model(pad_rows([rows[i] for i in chosen], PAD)).argmax(-1).tolist()
            found |= {i: loaded.labels[label] for i, label in zip(chosen, best, strict=True)}
    return [found[i] for i in range(len(rows))]


def naive_bayes(texts: Sequence[str]) -> list[str]:
    """The baseline: multinomial naive Bayes over runs of one to four characters within words, of the same texts.

    Its smoothing, 0.1, is the best on the validation side of 0.01, 0.03, 0.1, 0.3 and 1.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    learned, languages = zip(*split("train"), strict=True)
    counter = CountVectorizer(analyzer="char_wb", ngram_range=(1, 4), min_df=2, lowercase=False)
    model = MultinomialNB(alpha=0.1).fit(counter.fit_transform(learned), languages)
    return [str(language) for language in model.predict(counter.transform(texts))]


def report(label: str, predictions: Sequence[str], side: str) -> str:
    """The share that is right, of all texts, and as the mean over languages. Raises InputError unless there is one
    prediction for each text of `side`."""
    chosen = split(side)
    if len(predictions) != len(chosen):
        raise InputError(f"there are {len(predictions)} predictions for the {len(chosen)} texts of the {side} split")
    right: dict[str, list[bool]] = defaultdict(list)
    for found, (_, language) in zip(predictions, chosen, strict=True):
        right[language].append(found == language)
    every = sum(map(sum, right.values())) / len(chosen)
    mean = sum(sum(of) / len(of) for of in right.values()) / len(right)
    return f"{label}: {side}, {len(chosen)} texts of {len(right)} languages, {every:.2%} right, {mean:.2%} by language"


@click.group()
def main() -> None:
    """Languages of Django's messages: which texts there are, and how well they are told apart."""


@main.command("texts")
@SIDE
def print_texts(side: str) -> None:
    """Print the texts of a split, one a line."""
    click.echo("\n".join(text for text, _ in split(side)))


@main.command("score")
@click.argument("results", type=click.File(encoding="utf-8"), default="-")
@SIDE
def print_score(results: TextIO, side: str) -> None:
    """Score RESULTS, lines of `tformer-run --json` for the texts of `texts`."""
    click.echo(report("the file", [json.loads(line)["label"] for line in results], side))


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SIDE
def print_evaluation(checkpoint: Path, side: str) -> None:
    """Tell the languages of a split with CHECKPOINT, a model.pt, and with the baseline."""
    texts = [text for text, _ in split(side)]
    click.echo(report(checkpoint.name, predict(checkpoint, texts), side))
    click.echo(report("naive Bayes", naive_bayes(texts), side))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"tformer_models.languages: {error}", err=True)
        sys.exit(1)
