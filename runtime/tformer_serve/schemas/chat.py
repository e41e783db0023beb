"""The body of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tformer_runtime.base.errors import InputError, OptionError
from tformer_serve.client_inputs import decoded_base64
from tformer_serve.schemas.base import Items, RequestBody
from tformer_serve.schemas.openai_options import MAX_TOP_LOGPROBS, SHARED_NAMES, OpenAIRequest, ResponseFormat
from tformer_serve.schemas.tools import Choice, Tool, ToolCall, constraint

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


class ImageUrl(RequestBody):
    """An image. url: data:image/…;base64,…"""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {"detail": ("auto",)}

    url: str


class ImagePart(RequestBody):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(RequestBody):
    """A message of the conversation."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {
        "refusal": ("",), "annotations": ([],), "audio": (), "function_call": (), "reasoning_content": None,
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self, reads_images: bool) -> dict[str, Any]:
        """Return the message as chat templates read it. Raise InputError for an image that is not in the request."""
        if self.content is None and not self.tool_calls:
            raise InputError("a message needs a content")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._content(reads_images)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {name: value for name, value in named.items() if value is not None}

    def _content(self, reads_images: bool) -> str | list[dict[str, Any]]:
        """Return the content: parts for a model that reads images, whose template places them, and else a text."""
        if not isinstance(self.content, list):
            return self.content or ""
        parts: list[dict[str, Any]] = []
        for part in self.content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            else:
                parts.append({"type": "image", "image": _image(part.image_url.url)})
        if reads_images:
            return parts
        if any(part["type"] == "image" for part in parts):
            raise InputError("the model reads no images: leave out image_url")
        return "\n".join(part["text"] for part in parts)


def _image(url: str) -> bytes:
    """Return the content of an image. Raise InputError for a URL that holds none."""
    match = _DATA_URL.match(url)
    if match is None:
        raise InputError(f"the image {url[:60]!r} is not downloaded: send it as data:image/png;base64,…")
    return decoded_base64("image_url", url[match.end() :])


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {
        **OpenAIRequest.harmless,
        "modalities": (["text"],),
        "parallel_tool_calls": None,
    }
    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
        "functions": ("send tools, which have replaced it", ([],)),
        "function_call": ("send tool_choice, which has replaced it", ()),
        "audio": ("answers are texts", ()),
        "prediction": ("set prompt_lookup in /v1/generate", ()),
        "reasoning_effort": ("say it in a message, as the model expects it", ()),
        "verbosity": ("say it in a message", ()),
        "web_search_options": ("it does not search", ()),
    }

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Choice | None = None

    @property
    def names(self) -> dict[str, str]:
        """The fields whose options have other names."""
        limit = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
        constraint = "tools" if self.calls_tools else "response_format"
        return {**SHARED_NAMES, "max_new_tokens": limit, "json_schema": constraint, "grammar": constraint}

    @property
    def calls_tools(self) -> bool:
        """Whether an answer may be a call."""
        return bool(self.tools) and self.tool_choice != "none"

    def options(self) -> dict[str, Any]:
        """Return the fields as options of `GenerationOptions`. Raise OptionError for fields that exclude each other."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise OptionError("max_tokens and max_completion_tokens are one option: set one", option="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs needs logprobs: true", option="top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise OptionError("tool_choice needs tools", option="tool_choice")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        options = {**self.shared_options(), "max_new_tokens": limit, "top_logprobs": self.top_logprobs}
        form = self.response_format.constraint() if self.response_format else {}
        if form and self.calls_tools:
            raise OptionError(
                'response_format and tools exclude each other: set tool_choice to "none"', option="response_format"
            )
        return {**options, **form, **(constraint(self.tools or [], self.tool_choice or "auto") if self.tools else {})}

    def conversation(self, reads_images: bool) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them."""
        return [message.for_template(reads_images) for message in self.messages]

    def descriptions(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates read them."""
        return [tool.for_template() for tool in self.tools or []] or None
