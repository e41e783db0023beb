"""Extractive question answering: the span of a context that answers a question, as in transformers' pipeline.

The context is read in windows, each after the question. In a window, the probability of the answer from token i to
token j is

p(i, j) = softmax(start)ᵢ · softmax(end)ⱼ    for i ≤ j < i + max_answer_tokens

where softmax is over the context tokens and the first token of the window. Spans are widened to whole words. Spans with
the same text are one answer, and their probabilities are added. The probability of no answer is that of the first token
alone, its minimum over the windows.

transformers 5 dropped the pipeline. Results equal those of version 4:
https://huggingface.co/docs/transformers/v4.57.1/main_classes/pipelines, QuestionAnsweringPipeline
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.base.validation import check_bool, check_int
from tformer_runtime.preprocess.text_reader import TextWindow
from tformer_runtime.tasks.base import BaseTask, Outputs, TaskInput, only_request
from tformer_runtime.tasks.settings import Flag, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

FIRST = "first"  # setting of the manifest: the id of the first token, which stands for "no answer"; absent if none does
DEFAULT_MAX_SEQ_LEN, DEFAULT_DOC_STRIDE, DEFAULT_MAX_ANSWER_TOKENS = 384, 128, 15
MIN_SPANS_PER_WINDOW = 10  # beyond twice top_k: several spans may widen to one answer


class Answer(Struct, frozen=True):
    """An answer.

    text: part of the context; empty if the context holds no answer.
    score: its probability.
    start, end: offsets of the text in the context, in characters; `end` is exclusive.
    alternatives: the next best answers.
    """

    text: str
    score: float
    start: int
    end: int
    alternatives: tuple[Answer, ...] = ()


class QuestionAnswering(BaseTask):
    names = ("question-answering",)
    does = "answers questions from a context"
    call = "answer()"
    file_settings = {FIRST: int}  # noqa: RUF012
    needs_tokenizer = True
    can_truncate = False  # a context is read in windows
    # All spans, because the order of equally probable ones is arbitrary.
    comparison_settings = {"top_k": 10**6}  # noqa: RUF012
    flags = {  # noqa: RUF012
        "Answers": {
            "top_k": Flag("--top-k", "N", "Write the N best answers.  [default: 1]", int),
            "allow_no_answer": switch(
                "--allow-no-answer", "Write an empty answer if it is likelier than any part of the context."
            ),
            "max_answer_tokens": Flag(
                "--max-answer-tokens",
                "N",
                f"Allow at most N tokens in an answer.  [default: {DEFAULT_MAX_ANSWER_TOKENS}]",
                int,
            ),
            "max_seq_len": Flag(
                "--max-seq-len",
                "N",
                f"Read a long context in windows of N tokens, the question included.  [default: {DEFAULT_MAX_SEQ_LEN}]",
                int,
            ),
            "doc_stride": Flag(
                "--doc-stride",
                "N",
                f"Let windows share N tokens of the context.  [default: {DEFAULT_DOC_STRIDE} or half a window]",
                int,
            ),
        }
    }

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in values.items() if value is not None}
        model_limit = self._model_max_tokens
        defaults = {
            "top_k": 1,
            "max_answer_tokens": DEFAULT_MAX_ANSWER_TOKENS,
            "max_seq_len": min(model_limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN),
            "doc_stride": None,
        }
        settings = {name: values.pop(name, default) for name, default in defaults.items()}
        settings["allow_no_answer"] = check_bool("allow_no_answer", values.pop("allow_no_answer", False))
        super().settings(values)
        for name in ("top_k", "max_answer_tokens", "max_seq_len"):
            settings[name] = check_int(name, settings[name])
        window = settings["max_seq_len"]
        if model_limit and window > model_limit:
            raise OptionError(
                f"max_seq_len must be at most {model_limit}, for the model takes no more, not {window}",
                option="max_seq_len",
            )
        if settings["doc_stride"] is None:
            settings["doc_stride"] = min(window // 2, DEFAULT_DOC_STRIDE)
        if check_int("doc_stride", settings["doc_stride"], 0) >= window:
            raise OptionError(
                f"doc_stride must be less than a window, {window}, not {settings['doc_stride']}", option="doc_stride"
            )
        return settings

    @property
    def _model_max_tokens(self) -> int | None:
        encode = self.manifest.encode
        return min((spec.max_length for spec in encode.inputs if spec.max_length), default=None) if encode else None

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        return None if isinstance(text, str) else text

    def read_input(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> TaskInput:
        if isinstance(input, Mapping) and set(input) == {"question", "context"}:
            input = (input["question"], input["context"])  # type: ignore[assignment]
        if not isinstance(input, (tuple, list)) or len(input) != 2 or not all(isinstance(part, str) for part in input):
            raise InputError("give a question and the context to answer it from: two texts, with a tab between them")
        question, context = map(str, input)
        if not question.strip():
            raise InputError("the question is empty")
        windows = inputs.windows((question, context), max_tokens=settings["max_seq_len"], stride=settings["doc_stride"])
        if not context.strip() or not any((window.texts == 1).any() for window in windows):
            raise InputError("the context is empty")
        return TaskInput([inputs.window_arrays(window) for window in windows], (context, windows))

    def single_request(
        self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]
    ) -> Mapping[str, Array]:
        reading = self.read_input(input, inputs, truncate, settings)
        return only_request(reading, "the context", f"windows of {settings['max_seq_len']} tokens")

    def make_result(self, reading: TaskInput, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Answer:
        context, windows = reading.details
        answers: dict[str, Answer] = {}  # by text in lower case
        no_answer = np.inf
        span_count = 2 * settings["top_k"] + MIN_SPANS_PER_WINDOW
        for window, (start_logits, end_logits, *_) in zip(windows, outputs, strict=True):
            starts, ends, no_answer_here = self._probabilities(window, start_logits, end_logits)
            no_answer = min(no_answer, no_answer_here)
            for first, last, score in _best_spans(starts, ends, span_count, settings["max_answer_tokens"]):
                start, end = _widen_to_words(window, first, last)
                text = context[start:end]
                same = answers.get(text.lower())
                if same is not None:
                    text, start, end, score = same.text, same.start, same.end, same.score + score
                answers[text.lower()] = Answer(text, score, start, end)
        candidates = list(answers.values())
        if settings["allow_no_answer"] or not candidates:
            candidates.append(Answer("", float(no_answer), 0, 0))
        best, *others = sorted(candidates, key=lambda answer: -answer.score)[: settings["top_k"]]
        return Answer(best.text, best.score, best.start, best.end, tuple(others))

    def _probabilities(self, window: TextWindow, start: Array, end: Array) -> tuple[Array, Array, float]:
        """Return probabilities for a window: (time,) of a start and of an end at each token, and of no answer.

        start, end: logits (time,). Tokens outside the context have probability 0.
        """
        context = window.texts == 1
        first = window.ids == self.output_meaning.settings.get(FIRST, -1)
        both = []
        for logits in (start, end):
            logits = np.where(context | first, np.asarray(logits, np.float64), -np.inf)
            exponentials = np.exp(logits - logits.max()) if np.isfinite(logits).any() else np.zeros(len(logits))
            both.append(exponentials / (exponentials.sum() or 1))
        no_answer = float(both[0][0] * both[1][0])
        starts, ends = (np.where(context, probabilities, 0) for probabilities in both)
        return starts, ends, no_answer

    def numbers(self, result: Answer) -> Array:
        return np.array([result.score])

    def format_line(self, result: Answer) -> str:
        """Format the text and the probability of each answer."""
        ranked = (result, *result.alternatives)
        return "\t".join(f"{' '.join(answer.text.split())}\t{answer.score:.6g}" for answer in ranked)

    def format_fields(self, result: Answer) -> dict[str, Any]:
        best, *others = (
            {"text": answer.text, "score": answer.score, "start": answer.start, "end": answer.end}
            for answer in (result, *result.alternatives)
        )
        return {**best, **({"alternatives": others} if others else {})}


def _best_spans(starts: Array, ends: Array, max_spans: int, max_answer_tokens: int) -> list[tuple[int, int, float]]:
    """Return the most probable spans, best first: first token, last token, probability.

    starts, ends: (time,) probabilities. Cost: tokens × max_answer_tokens.
    """
    count = len(starts)
    scores = np.zeros((count, min(max_answer_tokens, count)))
    for extra in range(scores.shape[1]):
        scores[: count - extra, extra] = starts[: count - extra] * ends[extra:]
    order = np.argsort(-scores, axis=None, kind="stable")[:max_spans]
    spans = np.stack(np.unravel_index(order, scores.shape), 1).tolist()
    return [(first, first + extra, float(scores[first, extra])) for first, extra in spans if scores[first, extra] > 0]


def _widen_to_words(window: TextWindow, first: int, last: int) -> tuple[int, int]:
    """Return the characters from the word of token `first` to that of token `last`, as far as the window has them."""
    return int(_word_offsets(window, first)[0, 0]), int(_word_offsets(window, last)[-1, 1])


def _word_offsets(window: TextWindow, token: int) -> Array:
    """Return the offsets (n, 2) of the tokens of a token's word; of the token alone if the tokenizer has no words."""
    word = window.words[token]
    if word < 0:
        return window.offsets[token : token + 1]
    offsets: Array = window.offsets[(window.words == word) & (window.texts == 1)]
    return offsets
