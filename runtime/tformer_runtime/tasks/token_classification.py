"""Token classification: labelled spans of a text, such as names of people, as in transformers' pipeline.

`aggregation` decides how tokens become spans:

none     each token is a span
simple   each token has its most probable label; adjacent tokens of one label are one span, and B- begins a new one
first    as simple, but each word has the label of its first token
average  as simple, but each word has the most probable label of the mean of its tokens' probabilities
max      as simple, but each word has the label of its token with the highest probability

The score of a span is the mean of the scores of its tokens, or of its words.
https://huggingface.co/docs/transformers/main_classes/pipelines, TokenClassificationPipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.base.validation import check_int, invalid_value
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.text_reader import TextReader, TextWindow
from tformer_runtime.tasks.base import BaseTask, Outputs, TaskInput, only_request
from tformer_runtime.tasks.settings import Flag

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

OUTSIDE = "O"  # the label of tokens outside all spans
NONE, SIMPLE = "none", "simple"
AGGREGATIONS = (NONE, SIMPLE, "first", "average", "max")
UNKNOWN = "unknown"  # setting of the manifest: the id of the unknown token


class Span(Struct, frozen=True):
    """A labelled span of a text.

    score: the probability of the label.
    start, end: offsets of `text` in the input, in characters; `end` is exclusive.
    """

    label: str
    score: float
    text: str
    start: int
    end: int


class _Part(Struct, frozen=True):
    """A token or a word of a text.

    scores: (labels,) probabilities.
    start, end: offsets in the text, in characters.
    continues_word: whether a token belongs to the word of the token before it.
    """

    scores: Array
    start: int
    end: int
    continues_word: bool = False

    @property
    def best(self) -> int:
        """The index of the most probable label."""
        return int(self.scores.argmax())


class TokenClassification(BaseTask):
    names = ("token-classification",)
    does = "labels spans of its inputs"
    call = "entities()"
    file_settings = {UNKNOWN: int}  # noqa: RUF012
    needs_tokenizer = True
    flags = {  # noqa: RUF012
        "Spans": {
            "aggregation": Flag(
                "--aggregation",
                "|".join(AGGREGATIONS),
                f"Choose how tokens become spans, as in transformers' pipeline.  [default: {SIMPLE}]",
                str,
            ),
            "ignore_labels": Flag(
                "--ignore-labels",
                "LABEL",
                "Leave out spans of this label; repeatable; '' keeps all spans.  [default: O]",
                list,
                repeated=True,
            ),
            "doc_stride": Flag(
                "--doc-stride", "N", "Read a text that is too long in windows that share N tokens.", int
            ),
        }
    }
    comparison_settings = {"aggregation": NONE, "ignore_labels": ()}  # noqa: RUF012

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._reader = TextReader(manifest.tokenizers[next(iter(manifest.tokenizer_of.values()))])

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings.

        aggregation: see above.
        ignore_labels: labels whose spans are left out; O by default, and none if it is empty, as in the pipeline.
        doc_stride: tokens by which windows overlap, if a long text is read in windows; None to refuse such a text.
        """
        values = {name: value for name, value in values.items() if value is not None}
        aggregation, ignore_labels = values.pop("aggregation", SIMPLE), values.pop("ignore_labels", (OUTSIDE,))
        stride = values.pop("doc_stride", None)
        super().settings(values)
        if aggregation not in AGGREGATIONS:
            raise OptionError(
                f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {aggregation!r}", option="aggregation"
            )
        if stride is not None:
            stride = self._check_stride(stride)
            if aggregation == NONE:
                raise OptionError(
                    "doc_stride merges spans of several windows, but aggregation none makes no spans: choose another "
                    "aggregation",
                    option="doc_stride",
                )
        ignored = self._check_labels(ignore_labels, aggregation)
        return {"aggregation": aggregation, "ignore_labels": ignored, "doc_stride": stride}

    def _check_stride(self, stride: Any) -> int:
        """Raise OptionError for a stride of a whole window, because no window would bring more of the text."""
        assert self.manifest.encode is not None
        max_tokens = min((spec.max_length for spec in self.manifest.encode.inputs if spec.max_length), default=None)
        room = self._reader.room(max_tokens) if max_tokens is not None else None
        if check_int("doc_stride", stride, 0) >= (stride + 1 if room is None else room):
            raise OptionError(
                f"doc_stride must be less than the {room} tokens of text in a window, not {stride}",
                option="doc_stride",
            )
        return int(stride)

    def _check_labels(self, ignore_labels: Any, aggregation: str) -> tuple[str, ...]:
        """Return the labels as a tuple. Raise OptionError for a label that the model does not have."""
        if isinstance(ignore_labels, str):
            ignore_labels = (ignore_labels,)
        if not isinstance(ignore_labels, Iterable):
            raise invalid_value("ignore_labels", "labels", ignore_labels)
        labels = tuple(ignore_labels)
        if not all(isinstance(label, str) for label in labels):
            raise invalid_value("ignore_labels", "labels", ignore_labels)
        labels = tuple(label for label in labels if label)  # --ignore-labels "" stands for no labels
        known = [label if aggregation == NONE else _tag(label)[1] for label in self._labels]
        if known and (other := [label for label in labels if label not in (*known, OUTSIDE)]):
            raise OptionError(
                f"ignore_labels names {other[0]!r}, and the labels are {', '.join(dict.fromkeys(known))}",
                option="ignore_labels",
            )
        return labels

    @property
    def _labels(self) -> Sequence[str]:
        """The labels of the model; empty if the file holds neither their names nor their number."""
        assert self.manifest.encode is not None
        size = self.manifest.encode.outputs[0].shape[-1]
        return self.output_meaning.labels or [f"LABEL_{i}" for i in range(size if isinstance(size, int) else 0)]

    def truncates(self, truncate: Any, settings: Mapping[str, Any]) -> bool:
        truncates = super().truncates(truncate, settings)
        if truncates and settings["doc_stride"] is not None:
            raise OptionError(
                "truncate and doc_stride exclude each other: a text that is too long is either cut or read in windows"
            )
        return truncates

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        return text if isinstance(text, str) else None

    def read_input(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> TaskInput:
        if not isinstance(input, str):
            raise InputError("spans are parts of a text: give a text, not a pair, ids or a mapping")
        windows = inputs.windows(input, truncate, stride=settings["doc_stride"])
        _, reader = inputs.text_input
        return TaskInput([inputs.window_arrays(window) for window in windows], (input, windows, reader))

    def single_request(
        self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]
    ) -> Mapping[str, Array]:
        if settings["doc_stride"] is None:
            return super().single_request(input, inputs, truncate, settings)
        return only_request(self.read_input(input, inputs, truncate, settings), "the text")

    def make_result(self, reading: TaskInput, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> list[Span]:
        text, windows, reader = reading.details
        spans: list[Span] = []
        for window, (logits, *_) in zip(windows, outputs, strict=True):
            tokens = list(self._tokens(text, window, reader, np.asarray(logits, np.float64)))
            spans += self._spans(text, tokens, settings["aggregation"])
        spans = [span for span in spans if span.label not in settings["ignore_labels"]]
        return _without_overlaps(spans) if len(windows) > 1 else spans

    def _tokens(self, text: str, window: TextWindow, reader: TextReader, logits: Array) -> Iterator[_Part]:
        """Yield the tokens of the text. Words begin by the rules of transformers' pipeline."""
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        scores = exponentials / exponentials.sum(-1, keepdims=True)
        unknown = self.output_meaning.settings.get(UNKNOWN, reader.unknown)
        for position in np.flatnonzero(window.in_text):
            start, end = map(int, window.offsets[position])
            if reader.marks_subwords:
                continues = len(reader.token(int(window.ids[position]))) != end - start
            else:  # the tokenizer has no words: spaces separate them
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            yield _Part(scores[position], start, end, continues and window.ids[position] != unknown)

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
        labels = self.output_meaning.labels
        return labels[part.best] if labels else f"LABEL_{part.best}"

    def _span(self, text: str, parts: Sequence[_Part], label: str) -> Span:
        start, end = parts[0].start, parts[-1].end
        score = float(np.mean([part.scores[part.best] for part in parts]))
        return Span(label, score, text[start:end], start, end)

    def numbers(self, result: Sequence[Span]) -> Array:
        """Return (spans, 3): the score, and start and end as shares of the text."""
        length = max((span.end for span in result), default=0) or 1
        return np.array([(span.score, span.start / length, span.end / length) for span in result]).reshape(-1, 3)

    def format_line(self, result: Sequence[Span]) -> str:
        """Format the label, text and score of each span."""
        return "\t".join(f"{span.label}\t{' '.join(span.text.split())}\t{span.score:.6g}" for span in result)

    def format_fields(self, result: Sequence[Span]) -> dict[str, Any]:
        return {"spans": [asdict(span) for span in result]}


def _words(tokens: Iterable[_Part]) -> list[list[_Part]]:
    words: list[list[_Part]] = []
    for token in tokens:
        if words and token.continues_word:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: Sequence[_Part], aggregation: str) -> _Part:
    """Return a word from its tokens. Its probabilities follow from the aggregation."""
    if aggregation == "first":
        scores = tokens[0].scores
    elif aggregation == "max":
        scores = max(tokens, key=lambda token: float(token.scores.max())).scores
    else:
        scores = np.mean([token.scores for token in tokens], axis=0)
    return _Part(scores, tokens[0].start, tokens[-1].end)


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins a span, and the label without B- or I-."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _without_overlaps(spans: Iterable[Span]) -> list[Span]:
    """Return the longest of overlapping spans; of equally long ones that with the highest score."""
    separate: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        before = separate[-1] if separate else None
        if before is None or not before.start <= span.start < before.end:
            separate.append(span)
        elif (span.end - span.start, span.score) > (before.end - before.start, before.score):
            separate[-1] = span
    return separate
