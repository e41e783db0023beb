"""The bodies of /v1/embeddings, as OpenAI's API has it, and of /v1/similarity and /v1/rerank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tformer_runtime.base.errors import InputError, OptionError
from tformer_serve.schemas.base import Inputs, Items
from tformer_serve.schemas.single_pass import TaskInput, TaskRequest


class EmbeddingRequest(TaskRequest):
    """input: a text, ids, a mapping from the names of the inputs, or a list of these; {"base64": …} for an image."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {"user": None}

    input: str | Inputs[str] | Items[int] | Inputs[Items[int]] | dict[str, Any] | Inputs[dict[str, Any]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def inputs(self) -> list[Any]:
        """Return the inputs. Raise InputError if there is none."""
        if isinstance(self.input, (str, dict)):
            return [self.input]
        if not self.input:
            raise InputError("the input is an empty list: give a text, ids, or a list of these")
        return [self.input] if isinstance(self.input[0], int) else list(self.input)

    def check_dimensions(self, width: int) -> None:
        """Raise OptionError for another size than that of the vectors: no file says that a part of them suffices."""
        if self.dimensions not in (None, width):
            raise OptionError(
                f"dimensions may be {width} for this model, which gives vectors of that size alone: leave it out",
                option="dimensions",
            )


class SimilarityRequest(TaskRequest):
    """inputs: each is compared with each. pairs: the two parts of a pair are compared. Give one field."""

    inputs: Inputs[TaskInput] | None = None
    pairs: Inputs[Items[TaskInput]] | None = None

    def parts(self) -> tuple[str, list[Any]]:
        """Return the field that is set, and its inputs, for pairs one after another. Raise InputError for another."""
        if self.inputs is not None and self.pairs is None:
            return "inputs", self.inputs
        if self.pairs is None or self.inputs is not None:
            raise InputError("give inputs, to compare each with each, or pairs")
        for number, pair in enumerate(self.pairs):
            if len(pair) != 2:
                raise InputError(f"pairs[{number}] has {len(pair)} parts: a pair has two")
        return "pairs", [part for pair in self.pairs for part in pair]


class RerankRequest(TaskRequest):
    """query, documents: texts. top_n: documents of the answer; all by default."""

    query: str
    documents: Inputs[str]
    top_n: int | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        """Raise OptionError for an answer without documents."""
        if self.top_n is not None and self.top_n < 1:
            raise OptionError(f"top_n must be a whole number of at least 1, not {self.top_n}", option="top_n")
