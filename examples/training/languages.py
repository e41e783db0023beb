"""The languages benchmark: text → its language, from the message catalogues of Django in 72 languages.

A language is a BCP 47 subtag, with the script if Django has it in two scripts; regional variants are one language.
Placeholders and HTML are removed from messages. Messages are split 90/5/5 by a hash of the English message, so a
message is in one split in all languages, and a text of the training split is in no other split.

    python -m examples.training.languages texts --split test     print the texts of a split, one per line
    python -m examples.training.languages score RESULTS.json     score the results of `tformer-run --json` for them
    python -m examples.training.languages evaluate MODEL.pt      score a checkpoint in PyTorch, and naive Bayes
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

from examples.training.g2p import SPLIT_OPTION, assign_split
from tformer_export.common.checkpoint import load_checkpoint
from tformer_runtime.base.errors import InputError, MissingExtraError, TformerError

if TYPE_CHECKING:
    from tformer_models.data import Dataset

NON_LANGUAGE = re.compile(r"%\(\w+\)[\d.]*[a-z]|%[a-z%]|\{[^{}]*\}|<[^<>]*>|&\w+;|\s+")
SOURCE_LANGUAGE = "en"  # the language that Django's messages are translated from
MIN_LANGUAGE_MESSAGES = 300  # languages with fewer messages are left out
MIN_TEXT_BYTES = 12  # of UTF-8; shorter texts do not identify a language
MIN_TEXT_LETTERS = 4
MIN_CROP_WORDS = 2
PAD = 0  # the padding id

Texts = list[tuple[str, str]]  # (text, language)


@functools.cache
def load_messages() -> dict[str, dict[str, frozenset[str]]]:
    """Return language → English message → its texts in that language, from all catalogues."""
    texts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for language, english, translation in _read_translations():
        for name, text in ((language, translation), (SOURCE_LANGUAGE, english)):
            if (cleaned := clean_text(text)) and (name == SOURCE_LANGUAGE or cleaned != clean_text(english)):
                texts[name][english].add(cleaned)
    return {
        language: {english: frozenset(translations) for english, translations in sorted(messages.items())}
        for language, messages in sorted(texts.items())
        if len(messages) >= MIN_LANGUAGE_MESSAGES
    }


def _read_translations() -> Iterator[tuple[str, str, str]]:
    """Yield (language, English message, translation) of Django's catalogues.

    Raises MissingExtraError if the package babel or django is not installed.
    """
    try:
        from babel.messages.mofile import read_mo
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package babel is not installed: pip install 'tformer[examples]'") from error
    django = find_spec("django")
    if django is None or not django.submodule_search_locations:
        raise MissingExtraError("the package django is not installed: pip install 'tformer[examples]'")
    for path in sorted(Path(django.submodule_search_locations[0]).rglob("*.mo")):
        language = language_of(path.parent.parent.name)
        with path.open("rb") as file:
            for message in read_mo(file):
                english, translation = _singular(message.id), _singular(message.string)
                if english and translation:
                    yield language, english, translation


def _singular(message: str | Sequence[str] | None) -> str:
    """Return the first form of a message, which has several if it depends on a number."""
    return message if isinstance(message, str) else (message or ("",))[0]


def language_of(locale: str) -> str:
    """Return the language of a Django locale: zh_Hans → zh-Hans, pt_BR → pt."""
    language, _, suffix = locale.partition("_")
    return f"{language}-{suffix}" if re.fullmatch("[A-Z][a-z]{3}", suffix) else language


def clean_text(message: str) -> str:
    """Return the message without placeholders and HTML, with single spaces; "" if too little text remains."""
    text = " ".join(NON_LANGUAGE.sub(" ", unicodedata.normalize("NFC", message)).split())
    is_enough = len(text.encode()) >= MIN_TEXT_BYTES and sum(map(str.isalpha, text)) >= MIN_TEXT_LETTERS
    return text if is_enough else ""


@functools.cache
def load_split(split: str) -> Texts:
    """Return the texts of a split, sorted by language and then alphabetically."""
    texts: dict[str, set[str]] = {}
    for language, messages in load_messages().items():
        in_split = (translations for english, translations in messages.items() if assign_split(english) == split)
        texts[language] = set().union(*in_split)
    if split != "train":
        train_texts = set(load_split("train"))
        texts = {
            language: {text for text in language_texts if (text, language) not in train_texts}
            for language, language_texts in texts.items()
        }
    return [(text, language) for language, language_texts in texts.items() for text in sorted(language_texts)]


def dataset(vocabulary: int = 6000, max_tokens: int = 128, crops: int = 1, mixes: int = 4, seed: int = 1) -> Dataset:
    """Return the data of the recipe.

    vocabulary: size of the byte pair vocabulary. max_tokens: length at which texts are truncated.
    crops, mixes: augmentation: cropped and mixed copies of the training texts, drawn by `seed`. Mixed texts make the
        model learn words and their pieces, because there are too few texts to learn from as wholes.
    """
    from tokenizers import Tokenizer

    from tformer_models.data import Dataset

    train_texts, rng = load_split("train"), random.Random(seed)
    held_out = {text for split in ("validation", "test") for text, _ in load_split(split)}
    tokenizer_json = tokenizer([text for text, _ in train_texts], vocabulary)
    labels = list(load_messages())
    encode = Tokenizer.from_str(tokenizer_json).encode

    def make_pairs(texts: Texts) -> list[tuple[list[int], list[int]]]:
        return [(encode(text).ids[:max_tokens], [labels.index(language)]) for text, language in texts]

    return Dataset(
        train=[
            *make_pairs(train_texts),
            *(pair for _ in range(crops) for pair in make_pairs(crop_texts(train_texts, rng, held_out))),
            *(pair for _ in range(mixes) for pair in make_pairs(mix_texts(train_texts, rng, held_out))),
        ],
        validation=make_pairs(load_split("validation")),
        model_arguments={"vocabulary": Tokenizer.from_str(tokenizer_json).get_vocab_size(), "labels": len(labels)},
        tokenizers={"ids": tokenizer_json},
        special_tokens={"bos_token_id": [], "eos_token_id": [], "pad_token_id": PAD},
        labels=labels,
    )


def crop_texts(texts: Texts, rng: random.Random, held_out: Set[str] = frozenset()) -> Texts:
    """Return a random run of consecutive words of each text.

    Texts of fewer than three words are left out, and so are crops that are too short or in `held_out`.
    """
    crops = []
    for text, language in texts:
        words = text.split()
        if len(words) <= MIN_CROP_WORDS:
            continue
        count = rng.randint(MIN_CROP_WORDS, len(words) - 1)
        start = rng.randint(0, len(words) - count)
        crops.append((" ".join(words[start : start + count]), language))
    return _drop_unusable(crops, held_out)


def mix_texts(texts: Texts, rng: random.Random, held_out: Set[str] = frozenset()) -> Texts:
    """Return one text per text, of as many words, drawn from it and from a random text of its language.

    Mixtures that are too short or in `held_out` are left out.
    """
    by_language: dict[str, list[str]] = defaultdict(list)
    for text, language in texts:
        by_language[language].append(text)
    mixtures = []
    for text, language in texts:
        words = text.split()
        candidates = [*words, *rng.choice(by_language[language]).split()]
        mixtures.append((" ".join(rng.sample(candidates, len(words))), language))
    return _drop_unusable(mixtures, held_out)


def _drop_unusable(texts: Texts, held_out: Set[str]) -> Texts:
    """Return the cleaned texts, except texts that are too short or in `held_out`."""
    cleaned = ((clean_text(text), language) for text, language in texts)
    return [(text, language) for text, language in cleaned if text and text not in held_out]


def tokenizer(texts: Sequence[str], vocabulary: int) -> str:
    """Train byte-level BPE on `texts`; return tokenizers' JSON. It encodes every text, as it has all bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    result = Tokenizer(models.BPE())
    result.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return result.to_str()


def predict(checkpoint: Path, texts: Sequence[str], batch_size: int = 256) -> list[str]:
    """Return the language of each text, predicted in PyTorch by a model.pt.

    Raises InputError if the checkpoint has no labels.
    """
    import torch
    from tokenizers import Tokenizer

    from tformer_models.data import pad_rows

    loaded = load_checkpoint(checkpoint)
    if not loaded.labels:
        raise InputError(f"{checkpoint} has no labels: it is not a classifier")
    model = loaded.build()
    encode = Tokenizer.from_str(loaded.tokenizers["ids"]).encode
    rows = [encode(text).ids[: loaded.max_length] for text in texts]
    predictions: dict[int, str] = {}
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            batch = by_length[start : start + batch_size]
            label_indices = model(pad_rows([rows[i] for i in batch], PAD)).argmax(-1).tolist()
            predictions |= {i: loaded.labels[index] for i, index in zip(batch, label_indices, strict=True)}
    return [predictions[i] for i in range(len(rows))]


def predict_naive_bayes(texts: Sequence[str]) -> list[str]:
    """Return the language of each text by the baseline, trained on the same texts.

    The baseline is multinomial naive Bayes over character n-grams (1 to 4) within words. The smoothing is the best of
    0.01, 0.03, 0.1, 0.3 and 1 on the validation split.
    """
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    train_texts, languages = zip(*load_split("train"), strict=True)
    vectorizer = CountVectorizer(analyzer="char_wb", ngram_range=(1, 4), min_df=2, lowercase=False)
    model = MultinomialNB(alpha=0.1).fit(vectorizer.fit_transform(train_texts), languages)
    return [str(language) for language in model.predict(vectorizer.transform(texts))]


def format_report(name: str, predictions: Sequence[str], split: str) -> str:
    """Return the accuracy of a split as text: over all texts, and the mean over languages.

    Raises InputError unless there is one prediction per text of the split.
    """
    texts = load_split(split)
    if len(predictions) != len(texts):
        raise InputError(f"there are {len(predictions)} predictions for the {len(texts)} texts of the {split} split")
    correct: dict[str, list[bool]] = defaultdict(list)
    for prediction, (_, language) in zip(predictions, texts, strict=True):
        correct[language].append(prediction == language)
    accuracy = sum(map(sum, correct.values())) / len(texts)
    language_mean = sum(sum(results) / len(results) for results in correct.values()) / len(correct)
    return (
        f"{name}: {split}, {len(texts)} texts of {len(correct)} languages, accuracy {accuracy:.2%}, "
        f"mean over languages {language_mean:.2%}"
    )


@click.group()
def main() -> None:
    """Print and score the texts of the languages benchmark."""


@main.command("texts")
@SPLIT_OPTION
def print_texts(split: str) -> None:
    """Print the texts of a split, one per line."""
    click.echo("\n".join(text for text, _ in load_split(split)))


@main.command("score")
@click.argument("results", type=click.File(encoding="utf-8"), default="-")
@SPLIT_OPTION
def print_score(results: TextIO, split: str) -> None:
    """Score RESULTS, the lines of `tformer-run --json` for the texts of the command `texts`."""
    click.echo(format_report("the file", [json.loads(line)["label"] for line in results], split))


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SPLIT_OPTION
def print_evaluation(checkpoint: Path, split: str) -> None:
    """Predict the languages of a split with CHECKPOINT, a model.pt, and with naive Bayes, and score both."""
    texts = [text for text, _ in load_split(split)]
    click.echo(format_report(checkpoint.name, predict(checkpoint, texts), split))
    click.echo(format_report("naive Bayes", predict_naive_bayes(texts), split))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"examples.training.languages: {error}", err=True)
        sys.exit(1)
