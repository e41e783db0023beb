"""Functions that an answer may call. A call is an answer in JSON, {"name": …, "arguments": {…}}, by a constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from tformer_runtime.base.errors import OptionError
from tformer_runtime.preprocess.json_schema import WHITE_SPACE
from tformer_serve.errors import names_in_words
from tformer_serve.schemas.base import RequestBody

_NAME = r"^[A-Za-z0-9_-]{1,64}$"
# A text that does not begin as JSON of an object does, or no text.
_TEXT_OR_CALL = "start: TEXT | call\nTEXT: /([ \\n\\t]*[^{{ \\n\\t](.|\\n)*)?/\ncall: %json {schema}\n"


class Function(RequestBody):
    """A function. parameters: the JSON schema of its arguments. strict: of no effect: every call follows the schema."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    """A function, as a tool."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = {name: value for name, value in self.function if value is not None}
        return {"type": "function", "function": function}


class NamedFunction(RequestBody):
    name: str


class ToolChoice(RequestBody):
    """The function that an answer has to call."""

    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | ToolChoice


def constraint(tools: Sequence[Tool], choice: Choice) -> dict[str, Any]:
    """Return the options that force an answer to be a call, or to be a text or a call ("auto").

    Raise OptionError for the choice of a function that is not among the tools.
    """
    if choice == "none":
        return {}
    functions = [tool.function for tool in tools]
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            known = names_in_words([tool.function.name for tool in tools])
            raise OptionError(
                f"tool_choice names {choice.function.name[:100]!r}, and the tools are {known}", option="tool_choice"
            )
    try:
        schema = _call_schema(functions)
        text = json.dumps(schema)
    except RecursionError as error:
        raise OptionError("tools are nested too deeply", option="tools") from error
    return {"grammar": _TEXT_OR_CALL.format(schema=text)} if choice == "auto" else {"json_schema": schema}


def _call_schema(functions: Sequence[Function]) -> dict[str, Any]:
    """Return the schema of a call of one of some functions."""
    definitions, calls = {}, []
    for number, function in enumerate(functions):
        place = f"#/$defs/arguments{number}"
        parameters = function.parameters or {"type": "object", "properties": {}}
        definitions[f"arguments{number}"] = _moved(parameters, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    call = {"anyOf": calls} if len(calls) > 1 else calls[0]
    return {**call, "$defs": definitions, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself begin at its new place in another schema."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def call_of(text: str) -> tuple[str, str] | None:
    """Return the name of the function that an answer calls, and its arguments as JSON.

    None for an answer in words, and for a call that is not complete.
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
        return None
    return call["name"], json.dumps(call["arguments"], ensure_ascii=False)


class CalledFunction(RequestBody):
    name: str
    arguments: str


class ToolCall(RequestBody):
    """A call in a message of the conversation."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {"index": None}

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it, with the arguments as a mapping."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "function": function, **({} if self.id is None else {"id": self.id})}
