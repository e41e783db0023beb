"""The bodies of /v1/classify, /v1/entities, /v1/answer and /v1/fill, with the names of `Model`'s arguments.

Limits are for what strangers could ask: the runtime has none.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.tasks import FillMask
from tformer_serve.schemas.base import Inputs, Items, RequestBody

MAX_TOP_K = 1000
MAX_WINDOW = 4096  # tokens
MAX_ANSWER_TOKENS = 512  # each begin of an answer is compared with as many ends
MAX_CANDIDATES = 10_000  # of an answer, each with a whole text

TaskInput = str | list[Any] | dict[str, Any]


class TaskRequest(RequestBody):
    """What the bodies share. A field that is left out has its default in Python.

    truncate: whether inputs that are too long are cut.
    adapter: of the file.
    """

    model: str
    truncate: bool | None = None
    adapter: str | None = None


class ClassifyRequest(TaskRequest):
    """inputs: texts, pairs of texts, ids, or mappings from the names of the inputs; {"base64": …} for an image."""

    inputs: Inputs[TaskInput]
    top_k: int | None = Field(default=None, le=MAX_TOP_K)

    def settings(self) -> dict[str, Any]:
        return {"top_k": self.top_k}


class EntitiesRequest(TaskRequest):
    texts: Inputs[str]
    aggregation: str | None = None
    ignore_labels: str | Items[str] | None = None
    doc_stride: int | None = None

    def settings(self, manifest: Manifest) -> dict[str, Any]:
        """Return the settings. Raise OptionError for windows that share more than half of their tokens."""
        specs = manifest.encode.inputs if manifest.encode else ()
        window = min((spec.max_length for spec in specs if spec.max_length), default=MAX_WINDOW)
        _check_stride(self.doc_stride, window)
        return {"aggregation": self.aggregation, "ignore_labels": self.ignore_labels, "doc_stride": self.doc_stride}


class Pair(RequestBody):
    question: str
    context: str


class AnswerRequest(TaskRequest):
    """pairs: [question, context], or mappings with these names."""

    pairs: Inputs[Items[str] | Pair]
    top_k: int | None = Field(default=None, le=MAX_TOP_K)
    allow_no_answer: bool | None = None
    max_answer_tokens: int | None = Field(default=None, le=MAX_ANSWER_TOKENS)
    max_seq_len: int | None = Field(default=None, le=MAX_WINDOW)
    doc_stride: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings. Raise OptionError for windows that share more than half of their tokens."""
        if self.max_seq_len is not None:
            _check_stride(self.doc_stride, self.max_seq_len)
        names = ("top_k", "allow_no_answer", "max_answer_tokens", "max_seq_len", "doc_stride")
        return {name: getattr(self, name) for name in names}

    def inputs(self) -> list[list[str]]:
        return [[pair.question, pair.context] if isinstance(pair, Pair) else pair for pair in self.pairs]


class FillRequest(TaskRequest):
    """texts: texts with masks, or ids."""

    texts: Inputs[str | Items[int]]
    top_k: int | None = Field(default=None, le=MAX_TOP_K)
    candidate_tokens: str | Inputs[str | int] | None = None

    def settings(self) -> dict[str, Any]:
        return {"top_k": self.top_k, "candidate_tokens": self.candidate_tokens}

    def check_size(self, task: FillMask, top_k: int) -> None:
        """Raise OptionError for more candidates than an answer may have. top_k: of a mask."""
        masks = sum(
            text.count(task.mask_token) if isinstance(text, str) else text.count(task.mask) for text in self.texts
        )
        if masks * top_k > MAX_CANDIDATES:
            raise OptionError(
                f"top_k={top_k} for {masks:,} masks gives more than the {MAX_CANDIDATES:,} tokens of an answer: "
                "give fewer texts, or a smaller top_k",
                option="top_k",
            )


def _check_stride(stride: int | None, window: int) -> None:
    """Raise OptionError for windows that share more than half of their tokens, and are so as many as they can be."""
    if stride is not None and stride > window // 2:
        raise OptionError(
            f"doc_stride={stride} is more than half of a window of {window} tokens: set less", option="doc_stride"
        )
