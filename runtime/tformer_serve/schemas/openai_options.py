"""The fields that completions and chats share, and what they are among the options of `GenerationOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.model import Model
from tformer_serve.errors import ApiError
from tformer_serve.schemas.base import Items, RequestBody

MAX_TOP_LOGPROBS = 20  # of OpenAI's API
SHARED_NAMES = {"stop_strings": "stop", "num_return_sequences": "n"}
_SAME = ("temperature", "top_p", "seed", "logit_bias", "presence_penalty", "frequency_penalty")
_OWN = ("top_k", "min_p", "repetition_penalty", "adapter")


class StreamOptions(RequestBody):
    """Options of a stream. include_usage: whether a last event has the numbers of tokens."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


class JsonSchema(RequestBody):
    """A schema of an answer. name, description, strict: of no effect, because every answer follows its schema."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> dict[str, Any]:
        """Return the options that force the form. Raise ApiError for a form without its schema."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = 'response_format has a json_schema if its type is "json_schema", and else none'
            raise ApiError(400, message, "invalid_option", "response_format")
        if self.type == "text":
            return {}
        return {"json_schema": {"type": "object"} if self.json_schema is None else self.json_schema.schema_}


class OpenAIRequest(RequestBody):
    """What completions and chats share. A field that is left out has the default of the model file.

    top_k, min_p, repetition_penalty, adapter: options of this server, as `extra_body` of OpenAI's client.
    """

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {
        "user": None,
        "metadata": None,
        "store": (False,),
        "service_tier": ("auto", "default"),
        "safety_identifier": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
    }

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | Items[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logit_bias: dict[str, Any] | None = None  # `GenerationOptions` checks the numbers
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    adapter: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def shared_options(self) -> dict[str, Any]:
        """Return the options of the shared fields. Raise ApiError for stream_options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", "invalid_value", "stream_options")
        options = {name: getattr(self, name) for name in (*_SAME, *_OWN)}
        options["num_return_sequences"] = 1 if self.n is None else self.n
        options["stop_strings"] = self.stop or None
        return options


def checked_options(model: Model, options: Mapping[str, Any]) -> GenerationOptions:
    """Return the options of a request. Raise the errors of `Model.settings`."""
    checked = GenerationOptions(**options)
    count = checked.num_return_sequences or 1
    settings = model.settings(checked if count == 1 else checked.replace({"num_return_sequences": 1}), {})
    if count > settings.num_beams and not settings.sampling:
        raise OptionError(
            f"num_return_sequences={count} gives {count} equal answers without sampling: set a temperature above 0",
            option="num_return_sequences",
        )
    return checked
