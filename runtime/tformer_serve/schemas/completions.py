"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from tformer_runtime.base.errors import InputError
from tformer_serve.schemas.base import Inputs, Items
from tformer_serve.schemas.openai_options import SHARED_NAMES, OpenAIRequest, ResponseFormat

NAMES = {**SHARED_NAMES, "max_new_tokens": "max_tokens", "top_logprobs": "logprobs", "json_schema": "response_format"}
MAX_LOGPROBS = 5  # of OpenAI's API


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions.

    prompt: a text or ids, or a list of these. For an encoder-decoder it is the source.
    """

    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
        "echo": ("the answer is without the prompt", (False,)),
        "suffix": ("no model is told what comes after the answer", ("",)),
        "best_of": ("ask for n answers with logprobs, and choose", (1,)),
    }

    prompt: str | Inputs[str] | Items[int] | Inputs[Items[int]]
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Each has its own answers. Raise InputError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InputError("the prompt is an empty list: give a text, ids, or a list of these")
        if isinstance(self.prompt[0], int):
            return [[int(i) for i in self.prompt]]
        return list(self.prompt)

    def options(self) -> dict[str, Any]:
        """Return the fields as options of `GenerationOptions`."""
        options = {**self.shared_options(), "max_new_tokens": self.max_tokens, "top_logprobs": self.logprobs}
        return {**options, **(self.response_format.constraint() if self.response_format else {})}
