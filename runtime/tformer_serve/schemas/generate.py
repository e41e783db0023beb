"""The body of /v1/generate: an input, and every option of `GenerationOptions` under its name in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import create_model

from tformer_runtime.decoding.options import OPTIONS, GenerationOptions
from tformer_serve.schemas.base import RequestBody

_OPTIONS = [name for name, spec in OPTIONS.items() if spec.not_in_json is None]
_NOT_IN_JSON: dict[str, tuple[str, tuple[Any, ...]]] = {
    name: (f"it is {spec.not_in_json[0]}: {spec.not_in_json[1]}", ())
    for name, spec in OPTIONS.items()
    if spec.not_in_json is not None
}


class GenerateBody(RequestBody):
    """An input and options.

    input: a text, ids, or a mapping from the names of the inputs; {"base64": …} for an image.
    """

    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = _NOT_IN_JSON

    model: str
    input: str | list[Any] | dict[str, Any]
    stream: bool | None = None

    def options(self) -> GenerationOptions:
        """Return the options. Raise OptionError for impossible values."""
        return GenerationOptions(**{name: getattr(self, name) for name in _OPTIONS})


if TYPE_CHECKING:
    GenerateRequest = GenerateBody
else:  # with a field for each option, whose value `GenerationOptions` checks
    GenerateRequest = create_model("GenerateRequest", __base__=GenerateBody, **dict.fromkeys(_OPTIONS, (Any, None)))
