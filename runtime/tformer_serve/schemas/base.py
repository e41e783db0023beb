"""`RequestBody`: a body of a request, whose fields are all known, and the sentences of its errors."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tformer_serve.errors import ApiError

MAX_INPUTS = 2048  # of a request, as in OpenAI's API
_MAX_SHOWN_CHARACTERS = 100
_REFUSED, _UNKNOWN = "refused_field", "unknown_field"

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # one error is told, and a client could send a million
Inputs = Annotated[list[T], Field(fail_fast=True, max_length=MAX_INPUTS)]


class RequestBody(BaseModel):
    """A body of a request. Values have the types of JSON: "1" is not a number. The first unknown field ends the checks.

    harmless: fields of OpenAI's API that change no answer, and the values that they may have; None for any value.
    refused: fields of OpenAI's API that this server lacks, why, and the values that mean the same as no field.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}
    refused: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _remove_known(cls, data: Any) -> Any:
        """Remove harmless fields, and refuse the others that this server lacks, and unknown ones."""
        if not isinstance(data, Mapping):
            return data
        kept = dict(data)
        for name, values in cls.harmless.items():
            value = kept.pop(name, None)
            if value is not None and values is not None and not _is_one_of(value, values):
                allowed = " or ".join(map(repr, values))
                raise PydanticCustomError(_REFUSED, f"{name} may be {allowed} here: leave it out", {"field": name})
        for name, (why, values) in cls.refused.items():
            value = kept.pop(name, None)
            if value is not None and not _is_one_of(value, values):
                raise PydanticCustomError(_REFUSED, f"this server has no {name}: {why}", {"field": name})
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in kept:
            if name not in known:
                raise PydanticCustomError(_UNKNOWN, "there is no such option", {"field": name})
        return kept


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a value of JSON is one of some. True is not 1."""
    return any(type(value) is type(other) and value == other for other in values)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error of a body. errors: of pydantic; the first is told."""
    first = _most_telling(errors)
    place = [part for part in first["loc"] if part != "body"]
    kind, field = first["type"], _path(place)
    context = first.get("ctx") or {}
    if kind == _REFUSED:
        field = _path([*place, context["field"]])
        return ApiError(400, str(first["msg"]), "unsupported_option", field)
    if kind == _UNKNOWN:
        field = _path([*place, context["field"][:_MAX_SHOWN_CHARACTERS]])
        return ApiError(
            400, f"there is no option {field!r}: leave it out, or correct its name", "unknown_option", field
        )
    if kind == "missing":
        return ApiError(400, f"the request lacks {field or 'a body'}", "missing_field", field or None)
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', first['msg'])}", "invalid_json")
    if not field:
        return ApiError(400, "the body must be a JSON object, sent as Content-Type: application/json", "invalid_json")
    if kind == "too_long":
        return ApiError(400, f"{field} has more than {context['max_length']:,} parts: send fewer", "too_large", field)
    reason = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    shown = reprlib.repr(first.get("input"))  # of a value of any size and depth
    return ApiError(400, f"{field} {reason}, not {shown}", "invalid_value", field)


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the error to tell: names before sizes, and these before values: they may be why a value is wrong."""
    names = [error for error in errors if error["type"] in (_REFUSED, _UNKNOWN)]
    sizes = [error for error in errors if error["type"] == "too_long"]  # of one of the types that a value may have
    return (names or sizes or list(errors))[0]


def _path(place: Sequence[Any]) -> str:
    """Return the path of a field: messages[0].content. Names of the types of a union are left out."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "list", "dict", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path
