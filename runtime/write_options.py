"""Write the files that repeat the table of generation options: the fields of `Settings`, and the table for browsers.

`make options` runs this script. `tests/unit/runtime/decoding/test_generation_options.py` compares the files with the
table.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from tformer_runtime.decoding.options import OPTIONS, GenerationOptionSpec
from tformer_runtime.decoding.options import option_checks as checks
from tformer_runtime.decoding.options.option_checks import Check, Number, WholeNumber

FOLDER = Path(__file__).parent
WIDTH = 120  # of a line
MAX_SAFE_INTEGER = 2**53 - 1  # of a number in JavaScript
# Check → the types of a caller's value and of a checked value.
TYPES: dict[Any, tuple[str, str]] = {
    checks.boolean: ("boolean", "boolean"),
    checks.early_stopping: ("EarlyStopping", "EarlyStopping"),
    checks.text: ("string", "string"),
    checks.stop_strings: ("string | readonly string[]", "readonly string[]"),
    checks.prefix: ("string | readonly number[]", "string | readonly number[]"),
    checks.token_id: ("number", "number"),
    checks.token_ids: ("readonly number[]", "readonly number[]"),
    checks.token_sequences: ("readonly (readonly number[])[]", "readonly (readonly number[])[]"),
    checks.logit_bias: (
        "Readonly<Record<number, number>> | ReadonlyMap<number, number> | readonly (readonly [number, number])[]",
        "readonly (readonly [number, number])[]",
    ),
    checks.logits_processor: ("LogitsProcessor", "LogitsProcessor"),
}

_SETTINGS = '''"""The fields of `Settings`, with the types of checked values.

`make options` writes this file from the table in `option_table.py`.
"""

from __future__ import annotations

import msgspec

from tformer_runtime.decoding.options.option_checks import EarlyStopping, HasEngine, LogitsProcessor


class SettingsFields(msgspec.Struct, frozen=True):
    """One field for each option. The defaults are those of the table."""

{fields}
'''
_WEB = """/**
 * The table of generation options: the interface of JavaScript, the checks and the defaults.
 *
 * `make options` writes this file from the table of the Python runtime, `decoding/options/option_table.py`.
 */

import * as check from "./optionChecks.js";
import type {{ Check, EarlyStopping, LogitsProcessor }} from "./optionChecks.js";

/** Generation options with every value set. */
export interface Settings {{
{settings}
}}

/** Options of one generation request. A missing option has the default of the model file, and then of the table. */
export interface GenerationOptions {{
{options}
}}

export type OptionName = keyof Settings;
type Table = {{
  readonly [N in OptionName]: readonly [check: Check<NonNullable<Settings[N]>>, fallback: Settings[N]];
}};

/** Option → its check, and the value that holds if neither the caller nor the file sets one. */
export const OPTIONS: Table = {{
{table}
}};

/** Options of the Python runtime that this one lacks → advice. */
export const ABSENT: Readonly<Record<string, string>> = {{
{absent}
}};

/** Options whose values no file can hold → their kind. */
export const NOT_IN_FILES: Readonly<Record<string, string>> = {{
{not_in_files}
}};
"""


def written_files() -> dict[Path, str]:
    """Return path → content of the files."""
    return {
        FOLDER / "tformer_runtime" / "decoding" / "options" / "settings_fields.py": _settings_fields(),
        FOLDER / "web" / "src" / "decoding" / "optionTable.ts": _web_table(),
    }


def _settings_fields() -> str:
    fields = (f"    {name}: {_setting_type(spec)} = {spec.default!r}" for name, spec in OPTIONS.items())
    return _SETTINGS.format(fields="\n".join(fields))


def _setting_type(spec: GenerationOptionSpec) -> str:
    """Return the type of a setting: the annotation of its check."""
    check: Any = spec.kind.check
    if isinstance(check, (WholeNumber, Number)):
        check = type(check).__call__
    annotation: str = check.__annotations__["return"]
    return annotation if spec.default is not None else f"{annotation} | None"


def _web_table() -> str:
    specs = {_camel_case(name): spec for name, spec in OPTIONS.items() if spec.web is None}
    advice = {_camel_case(name): spec.web for name, spec in OPTIONS.items()}
    types = {name: _web_types(spec.kind.check) for name, spec in specs.items()}
    fallbacks = {name: _web_value(spec.default) for name, spec in specs.items()}
    optional = {name: " | undefined" if spec.default is None else "" for name, spec in specs.items()}
    return _WEB.format(
        settings="\n".join(f"  readonly {name}: {types[name][1]}{optional[name]};" for name in specs),
        options="\n".join(f"{_comment(spec.help)}\n  {name}?: {types[name][0]};" for name, spec in specs.items()),
        table="\n".join(
            f"  {name}: [check.{_web_check(spec.kind.check)}, {fallbacks[name]}]," for name, spec in specs.items()
        ),
        absent="\n".join(f"  {name}: {_web_value(text)}," for name, text in advice.items() if text is not None),
        not_in_files="\n".join(
            f"  {name}: {_web_value(spec.not_in_json[0])}," for name, spec in specs.items() if spec.not_in_json
        ),
    )


def _comment(help: str) -> str:
    """Return a help text as a comment of the interface."""
    text = re.sub(r"`(\w+)`", lambda name: f"`{_camel_case(name[1])}`", help)
    text = re.sub(r"\b(True|False)\b", lambda value: value[0].lower(), text)
    if len(line := f"  /** {text} */") <= WIDTH:
        return line
    lines = textwrap.wrap(text, WIDTH, initial_indent="   * ", subsequent_indent="   * ")
    return "\n".join(["  /**", *lines, "   */"])


def _web_types(check: Check) -> tuple[str, str]:
    if isinstance(check, WholeNumber) and check.maximum > MAX_SAFE_INTEGER:
        return "number | bigint", "bigint"
    if isinstance(check, (WholeNumber, Number)):
        return "number", "number"
    return TYPES[check]


def _web_check(check: Any) -> str:
    """Return a check as an expression of TypeScript."""
    if isinstance(check, WholeNumber) and check.maximum > MAX_SAFE_INTEGER:
        return f"bigInteger({check.minimum}n, {check.maximum}n)"
    if isinstance(check, WholeNumber):
        default = WholeNumber(check.minimum).maximum
        bounds = (check.minimum,) if check.maximum == default else (check.minimum, check.maximum)
        return f"wholeNumber({', '.join(map(_web_value, bounds))})"
    if isinstance(check, Number):
        names = ("minimum", "above", "maximum", "or_zero")
        bounds = {name: getattr(check, name) for name in names}
        bounds = {name: value for name, value in bounds.items() if value is not None and value is not False}
        values = ", ".join(f"{_camel_case(name)}: {_web_value(value)}" for name, value in bounds.items())
        return f"number({_web_value(check.allowed)}{f', {{ {values} }}' if values else ''})"
    return _camel_case(check.__name__)


def _web_value(value: Any) -> str:
    """Return a value of the table as an expression of TypeScript."""
    if value is None:
        return "undefined"
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e-0", "e-")
    return json.dumps(value)


def _camel_case(name: str) -> str:
    return re.sub(r"_(\w)", lambda letter: letter[1].upper(), name)


if __name__ == "__main__":
    for path, text in written_files().items():
        path.write_text(text, encoding="utf-8")
