"""Extractive question answering: the span of a context that answers a question, as transformers' pipeline finds it.

The context is read in windows, each behind the question. In each, of its n context tokens and the first token of all,

p(i, j) = softmax(start)ᵢ · softmax(end)ⱼ    for i ≤ j < i + longest

is the probability of the answer from token i to token j. Spans are widened to whole words; those of one text are one
answer, whose probabilities are added. That there is no answer is as probable as the span of the first token alone, in
the window where that is least.

transformers 5 has the pipeline no more; this is that of version 4,
https://huggingface.co/docs/transformers/v4.57.1/main_classes/pipelines, QuestionAnsweringPipeline
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.base.validation import flag, whole
from tformer_runtime.preprocess.text_reader import Window
from tformer_runtime.tasks.base import Outputs, Reading, Task, at_once
from tformer_runtime.tasks.settings import Flag, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

FIRST = "first"  # of the outcome's settings: the id of the token that stands for "there is no answer", if there is one
WINDOW, STRIDE, LONGEST = 384, 128, 15  # tokens, unless a file takes fewer, or other numbers are asked for


@dataclass(frozen=True)
class Answer:
    """start, end: the place of `text` in the context, of its first character and of the one after its last. score: its
    probability. An answer without text: there is none in the context. alternatives: the next best."""

    text: str
    score: float
    start: int
    end: int
    alternatives: tuple[Answer, ...] = ()


class Answers(Task):
    names = ("question-answering",)
    does = "answers questions from a context"
    call = "answer()"
    of_texts = True
    cuts = False  # a context is read in windows
    proven = {"top_k": 10**6}  # noqa: RUF012  (all spans: where many are as likely, which are the best is not told)
    flags = {  # noqa: RUF012
        "Answers": {
            "top_k": Flag("--top-k", "N", "Write the N best answers.", int),
            "no_answer": switch("--no-answer", "Write nothing for an answer where that is the likeliest."),
            "longest": Flag("--longest", "N", "Tokens that an answer has at most; by default 15.", int),
            "window": Flag("--window", "N", "Read a context in windows of N tokens, with the question; 384.", int),
            "stride": Flag("--stride", "N", "Windows share N tokens of the context; by default 128.", int),
        }
    }

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in given.items() if value is not None}
        counts = {"top_k": 1, "longest": LONGEST, "window": self._window, "stride": None}
        settings = {name: given.pop(name, default) for name, default in counts.items()}
        settings["no_answer"] = flag("no_answer", given.pop("no_answer", False))
        super().settings(given)
        for name in ("top_k", "longest", "window"):
            settings[name] = whole(name, settings[name])
        if settings["window"] > (most := self._most or settings["window"]):
            raise OptionError(f"window must be at most {most}, for the model takes no more, not {settings['window']}")
        if settings["stride"] is None:
            settings["stride"] = min(settings["window"] // 2, STRIDE)
        if whole("stride", settings["stride"], least=0) >= settings["window"]:
            raise OptionError(f"stride must be less than a window, {settings['window']}, not {settings['stride']}")
        return settings

    @property
    def _most(self) -> int | None:
        encode = self.manifest.encode
        return min((i.max_length for i in encode.inputs if i.max_length), default=None) if encode else None

    @property
    def _window(self) -> int:
        return min(self._most or WINDOW, WINDOW)

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        return None if isinstance(text, str) else text

    def reading(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Reading:
        if isinstance(input, Mapping) and set(input) == {"question", "context"}:
            input = (input["question"], input["context"])  # type: ignore[assignment]
        if not isinstance(input, (tuple, list)) or len(input) != 2 or not all(isinstance(part, str) for part in input):
            raise InputError("give a question and the context to answer it from: two texts, with a tab between them")
        question, context = map(str, input)
        if not question.strip():
            raise InputError("the question is empty")
        windows = inputs.windows((question, context), most=settings["window"], stride=settings["stride"])
        if not context.strip() or not any((window.texts == 1).any() for window in windows):  # nothing to answer from
            raise InputError("the context is empty")
        return Reading([inputs.arrays(window) for window in windows], (context, windows))

    def at_once(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Mapping[str, Array]:
        reading = self.reading(input, inputs, truncate, settings)
        return at_once(reading, "the context", f"windows of {settings['window']} tokens")

    def made(self, reading: Reading, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Answer:
        context, windows = reading.beside
        found: dict[str, Answer] = {}
        nothing = np.inf
        for window, (start, end, *_) in zip(windows, outputs, strict=True):
            begins, ends, none = self._probabilities(window, start, end)
            nothing = min(nothing, none)
            for i, j, score in _best(begins, ends, settings["top_k"] * 2 + 10, settings["longest"]):
                first, last = _in_words(window, i, j)
                text = context[first:last]
                same = found.get(text.lower())
                before = same.score if same is not None else 0.0
                first, last = (same.start, same.end) if same is not None else (first, last)
                found[text.lower()] = Answer(context[first:last], before + score, first, last)
        every = list(found.values())
        if settings["no_answer"] or not every:
            every.append(Answer("", float(nothing), 0, 0))
        best, *others = sorted(every, key=lambda answer: -answer.score)[: settings["top_k"]]
        return Answer(best.text, best.score, best.start, best.end, tuple(others))

    def _probabilities(self, window: Window, start: Array, end: Array) -> tuple[Array, Array, float]:
        """(time,) that an answer begins, and ends, at each token of the context; and that there is none."""
        context = window.texts == 1
        first = window.ids == self.outcome.settings.get(FIRST, -1)
        both = []
        for logits in (start, end):
            logits = np.where(context | first, np.asarray(logits, np.float64), -np.inf)
            powers = np.exp(logits - logits.max()) if np.isfinite(logits).any() else np.zeros(len(logits))
            both.append(powers / (powers.sum() or 1))
        none = float(both[0][0] * both[1][0])
        begins, ends = (np.where(context, values, 0) for values in both)
        return begins, ends, none

    def numbers(self, result: Answer) -> Array:
        return np.array([result.score])

    def line(self, result: Answer) -> str:
        """Of each answer its text, and its probability."""
        ranked = (result, *result.alternatives)
        return "\t".join(f"{' '.join(answer.text.split())}\t{answer.score:.6g}" for answer in ranked)

    def fields(self, result: Answer) -> dict[str, Any]:
        one, *others = (
            {"text": answer.text, "score": answer.score, "start": answer.start, "end": answer.end}
            for answer in (result, *result.alternatives)
        )
        return {**one, **({"alternatives": others} if others else {})}


def _best(begins: Array, ends: Array, most: int, longest: int) -> list[tuple[int, int, float]]:
    """The likeliest spans, (first token, last token, probability), the best first. Cost: tokens times `longest`."""
    count = len(begins)
    scores = np.zeros((count, min(longest, count)))
    for ahead in range(scores.shape[1]):
        scores[: count - ahead, ahead] = begins[: count - ahead] * ends[ahead:]
    order = np.argsort(-scores, axis=None, kind="stable")[:most]
    places = np.stack(np.unravel_index(order, scores.shape), 1).tolist()
    return [(at, at + ahead, float(scores[at, ahead])) for at, ahead in places if scores[at, ahead] > 0]


def _in_words(window: Window, first: int, last: int) -> tuple[int, int]:
    """The characters of tokens first to last of the context, in whole words as far as the window has them."""
    return int(_word(window, first)[0, 0]), int(_word(window, last)[-1, 1])


def _word(window: Window, token: int) -> Array:
    """The offsets, (n, 2), of the tokens of a token's word; its own where the tokenizer knows no words."""
    word = window.words[token]
    if word < 0:
        return window.offsets[token : token + 1]
    found: Array = window.offsets[(window.words == word) & (window.texts == 1)]
    return found
