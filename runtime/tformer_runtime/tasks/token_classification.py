"""Token classification: which spans of a text have which label, as names of people and places, as transformers'
pipeline makes them of the scores of each token.

Tokens are made words, words spans, by `aggregation`:

none     each token by itself
simple   each token has its likeliest label; neighbours of one label are one span, B- begins a new one
first    as simple, with the label of its first token for each word
average  with the likeliest label of the mean of its tokens' probabilities for each word
max      with the likeliest label of its surest token for each word

A span's score is the mean of the scores of its tokens, or of its words.
https://huggingface.co/docs/transformers/main_classes/pipelines, TokenClassificationPipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.base.validation import refused, whole
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.text_reader import Reader, Window
from tformer_runtime.tasks.base import Outputs, Reading, Task, at_once
from tformer_runtime.tasks.settings import Flag

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

OUTSIDE = "O"  # the label of what is no span
NONE, SIMPLE = "none", "simple"
AGGREGATIONS = (NONE, SIMPLE, "first", "average", "max")
UNKNOWN = "unknown"  # of the outcome's settings: the id of what the tokenizer does not know


@dataclass(frozen=True)
class Span:
    """start, end: the place of `text` in the input, of its first character and of the one after its last. score: the
    probability of the label."""

    label: str
    score: float
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Part:
    """A token or a word of a text, and the probabilities of each label. goes_on: with the word of the token before."""

    scores: Array
    start: int
    end: int
    goes_on: bool = False

    @property
    def best(self) -> int:
        return int(self.scores.argmax())


class Entities(Task):
    names = ("token-classification",)
    does = "labels spans of its inputs"
    call = "entities()"
    of_texts = True
    flags = {  # noqa: RUF012
        "Spans": {
            "aggregation": Flag("--aggregation", "|".join(AGGREGATIONS), "How tokens are made spans.", str),
            "ignore": Flag(
                "--ignore",
                "LABEL",
                "Leave out spans of this label, by default O; may be repeated, or '' for none.",
                list,
                repeated=True,
            ),
            "stride": Flag("--stride", "N", "Read what is too long in windows that share N tokens.", int),
        }
    }
    proven = {"aggregation": NONE, "ignore": ()}  # noqa: RUF012

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._reader = Reader(manifest.tokenizers[next(iter(manifest.tokenizer_of.values()))])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """aggregation: see above. ignore: labels that no span has; O unless some are given, as the pipeline has it, so
        that none are left out where that is empty. stride: by how many tokens the windows overlap in which a text is
        read that is too long; None: it is refused."""
        given = {name: value for name, value in given.items() if value is not None}
        aggregation, ignore = given.pop("aggregation", SIMPLE), given.pop("ignore", (OUTSIDE,))
        stride = given.pop("stride", None)
        super().settings(given)
        if aggregation not in AGGREGATIONS:
            raise OptionError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {aggregation!r}")
        if stride is not None:
            stride = self._overlap(stride)
            if aggregation == NONE:
                raise OptionError("stride makes spans of several windows, and aggregation none leaves each token alone")
        return {"aggregation": aggregation, "ignore": self._left_out(ignore, aggregation), "stride": stride}

    def _overlap(self, stride: Any) -> int:
        """Of windows; fewer tokens than one has of a text, or no window would bring more of it."""
        assert self.manifest.encode is not None
        most = min((spec.max_length for spec in self.manifest.encode.inputs if spec.max_length), default=None)
        room = self._reader.room(most) if most is not None else None
        if whole("stride", stride, least=0) >= (stride + 1 if room is None else room):
            raise OptionError(f"stride must be less than a window has of the text, {room} tokens, not {stride}")
        return int(stride)

    def _left_out(self, ignore: Any, aggregation: str) -> tuple[str, ...]:
        """OptionError for a label that no span has: another would be left in."""
        given = (ignore,) if isinstance(ignore, str) else tuple(ignore) if isinstance(ignore, Iterable) else (None,)
        if not all(isinstance(label, str) for label in given):
            raise refused("ignore", "labels", ignore)
        labels = tuple(label for label in given if label)  # one of no letters, such as --ignore "", is none
        known = [label if aggregation == NONE else _tag(label)[1] for label in self._labels]
        if known and (other := [label for label in labels if label not in (*known, OUTSIDE)]):
            raise OptionError(f"ignore names {other[0]!r}, and the labels are {', '.join(dict.fromkeys(known))}")
        return labels

    @property
    def _labels(self) -> Sequence[str]:
        """None where the file tells neither their names nor how many there are."""
        assert self.manifest.encode is not None
        size = self.manifest.encode.outputs[0].shape[-1]
        return self.outcome.labels or [f"LABEL_{i}" for i in range(size if isinstance(size, int) else 0)]

    def cutting(self, truncate: Any, settings: Mapping[str, Any]) -> bool:
        cuts = super().cutting(truncate, settings)
        if cuts and settings["stride"] is not None:
            raise OptionError("a text that is too long is cut or read in windows: give truncate or stride, not both")
        return cuts

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        return text if isinstance(text, str) else None

    def reading(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Reading:
        if not isinstance(input, str):
            raise InputError("spans are of a text: give one, not a pair, ids or names of inputs")
        windows = inputs.windows(input, truncate, stride=settings["stride"])
        _, reader = inputs.text_input
        return Reading([inputs.arrays(window) for window in windows], (input, windows, reader))

    def at_once(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        if settings["stride"] is None:
            return super().at_once(input, inputs, truncate, settings)
        return at_once(self.reading(input, inputs, truncate, settings), "the text")

    def made(self, reading: Reading, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> list[Span]:
        text, windows, reader = reading.beside
        found: list[Span] = []
        for window, (logits, *_) in zip(windows, outputs, strict=True):
            tokens = list(self._tokens(text, window, reader, np.asarray(logits, np.float64)))
            found += self._spans(text, tokens, settings["aggregation"])
        found = [span for span in found if span.label not in settings["ignore"]]
        return _apart(found) if len(windows) > 1 else found

    def _tokens(self, text: str, window: Window, reader: Reader, logits: Array) -> Iterator[_Part]:
        """Those of the text, by the pipeline's rules of what begins a word."""
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        scores = powers / powers.sum(-1, keepdims=True)
        unknown = self.outcome.settings.get(UNKNOWN, reader.unknown)
        for at in np.flatnonzero(window.own):
            start, end = map(int, window.offsets[at])
            if reader.marks_subwords:
                goes_on = len(reader.token(int(window.ids[at]))) != end - start
            else:  # such a tokenizer knows no words: one ends where there is a space
                goes_on = start > 0 and " " not in text[start - 1 : start + 1]
            yield _Part(scores[at], start, end, goes_on and window.ids[at] != unknown)

    def _spans(self, text: str, tokens: Sequence[_Part], aggregation: str) -> list[Span]:
        if aggregation == NONE:
            return [self._span(text, [token], self._label(token)) for token in tokens]
        parts = list(tokens) if aggregation == SIMPLE else [_word(word, aggregation) for word in _words(tokens)]
        groups: list[list[_Part]] = []
        for part in parts:
            begins, tag = _tag(self._label(part))
            if groups and not begins and tag == _tag(self._label(groups[-1][-1]))[1]:
                groups[-1].append(part)
            else:
                groups.append([part])
        return [self._span(text, group, self._label(group[0]).split("-", 1)[-1]) for group in groups]

    def _label(self, part: _Part) -> str:
        labels = self.outcome.labels
        return labels[part.best] if labels else f"LABEL_{part.best}"

    def _span(self, text: str, parts: Sequence[_Part], label: str) -> Span:
        start, end = parts[0].start, parts[-1].end
        score = float(np.mean([part.scores[part.best] for part in parts]))
        return Span(label, score, text[start:end], start, end)

    def numbers(self, result: Sequence[Span]) -> Array:
        """Of each span the score, and its place as a share of the text."""
        length = max((span.end for span in result), default=0) or 1
        return np.array([(span.score, span.start / length, span.end / length) for span in result]).reshape(-1, 3)

    def line(self, result: Sequence[Span]) -> str:
        """Of each span its label, text and score."""
        return "\t".join(f"{span.label}\t{' '.join(span.text.split())}\t{span.score:.6g}" for span in result)

    def fields(self, result: Sequence[Span]) -> dict[str, Any]:
        return {"spans": [vars(span) for span in result]}


def _words(tokens: Iterable[_Part]) -> list[list[_Part]]:
    words: list[list[_Part]] = []
    for token in tokens:
        if words and token.goes_on:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: Sequence[_Part], aggregation: str) -> _Part:
    """A word of its tokens, with the probabilities that stand for it."""
    if aggregation == "first":
        scores = tokens[0].scores
    elif aggregation == "max":
        scores = max(tokens, key=lambda token: float(token.scores.max())).scores
    else:
        scores = np.mean([token.scores for token in tokens], axis=0)
    return _Part(scores, tokens[0].start, tokens[-1].end)


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins a span, and what it is a label of."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _apart(spans: Iterable[Span]) -> list[Span]:
    """Of spans of several windows that overlap, the longest, of those the surest."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        before = found[-1] if found else None
        if before is None or not before.start <= span.start < before.end:
            found.append(span)
        elif (span.end - span.start, span.score) > (before.end - before.start, before.score):
            found[-1] = span
    return found
