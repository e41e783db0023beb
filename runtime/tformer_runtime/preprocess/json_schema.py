"""The parts of a JSON schema that a constraint reads itself: numbers, literal strings and white space."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tformer_runtime.base.errors import OptionError

WHITE_SPACE = r"( |\n {0,32})?"  # between the tokens of JSON: without a limit a model may write white space alone
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas with names
_MAXIMA = ("maximum", "exclusiveMaximum")
_BOUNDS = ("minimum", "exclusiveMinimum", *_MAXIMA, "multipleOf")


def with_white_space(schema: Any) -> Any:
    """Return a schema that bounds the white space of its texts, unless its "x-guidance" says something of it."""
    if not isinstance(schema, Mapping):  # true and false are schemas
        return schema
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, Mapping) or {"whitespace_flexible", "whitespace_pattern"} & set(guidance):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, **guidance}}


def check_numbers(schema: Any, kind: str) -> None:
    """Check that llguidance keeps the numbers that a schema demands or compares with.

    It reads them as float64, and casts those of integers to int64. An integer of −2⁶³ or less overflows its stack,
    which ends the process. A reference may lead to any part of a schema, so all parts are checked.
    kind: the name of the constraint in the message. Raises OptionError for a number that would be changed.
    """
    for key, value, _ in _entries(schema):
        numbers = _numbers(value) if key in ("enum", "const") else [value] if key in _BOUNDS else []
        for number in numbers:
            if not _is_kept(key, number):
                is_too_large = not -(1 << 63) < number < 1 << 63
                reason = (
                    "cannot be kept: bounds and whole numbers must lie between −2⁶³ and 2⁶³"
                    if is_too_large
                    else "cannot be kept exactly: numbers are read as float64"
                )
                raise OptionError(
                    f"the {kind} has {json.dumps(number)[:40]} as its {key}, which {reason}; use another bound, a "
                    "string, or a regex",
                    option=kind,
                )


def _is_kept(key: str, number: Any) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return True
    if number >= 1 << 63:  # as a maximum it allows all integers of 63 bits
        return key in _MAXIMA
    if number == (1 << 63) - 1:  # float64 has 2⁶³, which the cast makes this number
        return key != "exclusiveMaximum"
    return number > -(1 << 63) and float(number) == number


def literal_strings(schema: Any) -> list[str]:
    """Return the strings that a text of a schema may have to hold."""
    strings = []
    for key, value, is_name in _entries(schema):
        if is_name:
            continue
        if key in ("enum", "const", "required"):
            strings.append(json.dumps(value, ensure_ascii=False))
        elif key == "properties" and isinstance(value, dict):
            strings += value
    return strings


def schemas_in_grammar(grammar: str) -> Iterator[Any]:
    """Yield the schemas after each `%json` in a grammar in Lark's notation, also of one within a text.

    Raises OptionError for an object that is not JSON.
    """
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]
        except ValueError as error:
            raise OptionError(
                f"the schema after %json in the grammar is not JSON: {error}", option="grammar"
            ) from error


def _entries(schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield the keys and the values of all objects in a schema, and whether a key is a name and not a keyword."""
    pending = [(schema, False)]
    while pending:
        part, has_names = pending.pop()
        if isinstance(part, list):
            pending += [(element, False) for element in reversed(part)]
        elif isinstance(part, dict):
            for key, value in part.items():
                yield key, value, has_names
            pending += [(value, key in _BY_NAME and not has_names) for key, value in reversed(part.items())]


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the values within a value of JSON that are neither a list nor an object."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, (list, dict)):
            pending += part.values() if isinstance(part, dict) else part
        else:
            yield part
