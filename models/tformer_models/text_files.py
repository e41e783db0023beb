"""Text files of one's own as training data, with a tokenizer that is trained on them.

One example a line, in UTF-8; empty lines are left out. By task:

    text2text-generation   source, a tab, target     {"source": …, "target": …}
    text-generation        a text                    {"text": …}
    text-classification    text, a tab, label        {"text": …, "label": …}

A file whose name ends in .jsonl or .json holds JSON lines.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tformer_runtime.base.errors import InputError, OptionError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tformer_models.data import Dataset, Pair

TRANSLATION, LANGUAGE_MODEL, CLASSIFIER = "text2text-generation", "text-generation", "text-classification"
FIELDS = {TRANSLATION: ("source", "target"), LANGUAGE_MODEL: ("text",), CLASSIFIER: ("text", "label")}
PAD, BEGIN, END = range(3)  # ids of SPECIAL_TOKENS
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256  # all bytes, so that every text can be read


class Example(NamedTuple):
    """The fields of a line, in the order of `FIELDS`. place: the file and the line, for messages."""

    fields: tuple[str, ...]
    place: str


def dataset(
    train: str,
    validation: str = "",
    task: str = TRANSLATION,
    vocabulary: int = 4000,
    max_tokens: int = 128,
    validation_share: float = 0.05,
    seed: int = 1,
) -> Dataset:
    """Return the examples of text files as token data.

    validation: a file; without one, examples of `train` are held out, in this share, drawn by `seed`. Examples with
        the same first field are on the same side.
    vocabulary: the greatest number of ids of the tokenizer.
    max_tokens: the most tokens of a text, with those that mark its beginning and end. Longer texts of a language model
        are split, and of a classifier cut.

    Raises InputError, with the line, for a file that cannot be read or used; OptionError for an impossible option.
    """
    from tformer_models.data import Dataset

    examples = read_examples(Path(train), task)
    labels = sorted({example.fields[-1] for example in examples}) if task == CLASSIFIER else []
    if task == CLASSIFIER and len(labels) < 2:
        raise InputError(f"{train} has one label, {labels[0]!r}: a classifier needs examples of two at least")
    if validation:
        held_out = read_examples(Path(validation), task)
    else:
        examples, held_out = split_examples(examples, validation_share, seed, has_labels=task == CLASSIFIER)
        if not held_out:
            raise InputError(f"{train} has too few distinct examples to hold any out: give more, or a validation file")
    bpe = train_tokenizer([text for example in examples for text in _texts(example, task)], vocabulary)
    size = bpe.get_vocab_size()

    def make_pairs(chosen: Sequence[Example]) -> list[Pair]:
        return [pair for example in chosen for pair in _MAKE_PAIRS[task](bpe, example, max_tokens, labels)]

    both = {"source_vocabulary": size, "target_vocabulary": size}
    of_model: dict[str, dict[str, Any]] = {
        TRANSLATION: both,
        LANGUAGE_MODEL: {"vocabulary": size},
        CLASSIFIER: {"vocabulary": size, "labels": len(labels)},
    }
    return Dataset(
        train=make_pairs(examples),
        validation=make_pairs(held_out),
        model_arguments=of_model[task],
        tokenizers={"src": _framed(bpe, "$A </s>"), "tgt": bpe.to_str()}
        if task == TRANSLATION
        else {"ids": _framed(bpe, "<s> $A")},
        special_tokens={
            "bos_token_id": [BEGIN] if task == TRANSLATION else [],
            "eos_token_id": [] if task == CLASSIFIER else [END],
            "pad_token_id": PAD,
        },
        labels=labels,
        step_input="tgt" if task == TRANSLATION else "ids",
    )


def read_examples(path: Path, task: str) -> list[Example]:
    """Read the examples of a file. Raises InputError for a file without any, or for a line that is none."""
    read = _read_json if path.suffix in (".jsonl", ".json") else _read_fields
    names = FIELDS[task]
    examples = []
    for place, line in _lines(path):
        fields = read(line, names, place)
        for name, text in zip(names, fields, strict=True):
            if not text.strip():
                raise InputError(f"{place}: the {name} is empty")
        examples.append(Example(fields, place))
    if not examples:
        raise InputError(f"{path} holds no examples: give one a line")
    return examples


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line that is not empty."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        place = f"{path}, line {number}"
        try:
            text = line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise InputError(f"{place} is not UTF-8 (byte {error.start + 1} of the line): convert the file") from error
        if text.strip():
            yield place, text


def _read_fields(line: str, names: tuple[str, ...], place: str) -> tuple[str, ...]:
    fields = tuple(line.split("\t")) if len(names) > 1 else (line,)
    if len(fields) != len(names):
        raise InputError(
            f"{place} has {len(fields) - 1} tabs: an example is {' and '.join(names)}, with a tab between them"
        )
    return fields


def _read_json(line: str, names: tuple[str, ...], place: str) -> tuple[str, ...]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in names):
        raise InputError(f"{place} must be a JSON object with texts for {' and '.join(names)}")
    return tuple(content[name] for name in names)


def split_examples(
    examples: Sequence[Example], share: float, seed: int, has_labels: bool = False
) -> tuple[list[Example], list[Example]]:
    """Split examples into a part to train with and a part to validate with, a share of the distinct first fields.

    has_labels: whether each last field has to occur in the first part. The second part may be empty.
    """
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in sorted(examples):
        groups[example.fields[0]].append(example)
    firsts = list(groups)
    random.Random(seed).shuffle(firsts)
    left = Counter(example.fields[-1] for example in examples)
    held_out: set[str] = set()
    count = min(len(firsts) - 1, max(1, round(share * len(firsts))))
    for first in firsts:
        lasts = Counter(example.fields[-1] for example in groups[first])
        if len(held_out) < count and not (has_labels and any(left[last] == n for last, n in lasts.items())):
            held_out.add(first)
            left -= lasts
    parts: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        parts[example.fields[0] in held_out].append(example)
    return parts


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train byte-level BPE, which reads every text and writes it as it was, in NFC."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocabulary < MIN_VOCABULARY:
        raise OptionError(
            f"vocabulary must be at least {MIN_VOCABULARY}, the bytes and special tokens, not {vocabulary}"
        )
    result = Tokenizer(models.BPE())
    result.normalizer = normalizers.NFC()
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return result


def _framed(bpe: Tokenizer, template: str) -> str:
    """Return the tokenizer, as tokenizers' JSON, with special tokens around a text."""
    from tokenizers import Tokenizer, processors

    framed = Tokenizer.from_str(bpe.to_str())
    framed.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    text: str = framed.to_str()
    return text


def _texts(example: Example, task: str) -> tuple[str, ...]:
    return example.fields[:1] if task == CLASSIFIER else example.fields


def _translation_pairs(bpe: Tokenizer, example: Example, max_tokens: int, labels: Sequence[str]) -> Iterator[Pair]:
    source, target = (bpe.encode(text).ids for text in example.fields)
    for name, ids, special_tokens in (("source", source, 1), ("target", target, 2)):
        if len(ids) + special_tokens > max_tokens:
            raise InputError(
                f"{example.place}: the {name} has {len(ids) + special_tokens} tokens, and max_tokens is {max_tokens}: "
                "shorten the line, or raise max_tokens"
            )
    yield [*source, END], [BEGIN, *target, END]


def _language_model_pairs(bpe: Tokenizer, example: Example, max_tokens: int, labels: Sequence[str]) -> Iterator[Pair]:
    ids = [*bpe.encode(example.fields[0]).ids, END]
    for start in range(0, len(ids), max_tokens):
        targets = ids[start : start + max_tokens]
        yield [BEGIN if start == 0 else ids[start - 1], *targets[:-1]], targets


def _classifier_pairs(bpe: Tokenizer, example: Example, max_tokens: int, labels: Sequence[str]) -> Iterator[Pair]:
    text, label = example.fields
    if label not in labels:
        raise InputError(f"{example.place}: no example to train with has the label {label!r}")
    yield [BEGIN, *bpe.encode(text).ids][:max_tokens], [labels.index(label)]


_MAKE_PAIRS: dict[str, Callable[[Tokenizer, Example, int, Sequence[str]], Iterator[Pair]]] = {
    TRANSLATION: _translation_pairs,
    LANGUAGE_MODEL: _language_model_pairs,
    CLASSIFIER: _classifier_pairs,
}
