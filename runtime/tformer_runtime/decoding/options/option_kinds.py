"""Kinds of generation options: the check of a value, and its form on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from tformer_runtime.base.validation import MAX_INT
from tformer_runtime.decoding.options import option_checks as checks
from tformer_runtime.decoding.options.option_checks import Check


class Kind(Struct, frozen=True):
    """A kind of options.

    check: see `option_checks`.
    metavar: the name of the value on the command line; "" for a switch, None if the option is for Python alone.
    parse: from the text of the command line to a value; from all texts, as a tuple, if `repeated`.
    """

    check: Check
    metavar: str | None = None
    parse: Callable[[Any], Any] = str
    repeated: bool = False


def whole_number(minimum: int, maximum: int = MAX_INT) -> Kind:
    return Kind(checks.WholeNumber(minimum, maximum), "N", int)


def number(
    allowed: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    or_zero: bool = False,
) -> Kind:
    """Return the kind of finite numbers within bounds. Arguments: see `option_checks.Number`."""
    check = checks.Number(allowed=allowed, minimum=minimum, above=above, maximum=maximum, or_zero=or_zero)
    return Kind(check, "X", float)


def text(metavar: str) -> Kind:
    return Kind(checks.text, metavar)


def text_or_file(metavar: str, check: Check = checks.text) -> Kind:
    """Return the kind of texts that the command line also reads from files. metavar: of the text."""
    return Kind(check, f"{metavar}|@FILE", checks.parse_text_or_file)


SWITCH = Kind(checks.boolean, "", bool)
EARLY_STOPPING = Kind(checks.early_stopping, "true|false|never", checks.parse_early_stopping)
STOP_STRINGS = Kind(checks.stop_strings, "TEXT", list, repeated=True)
CHOICES = Kind(checks.choices, "TEXT", list, repeated=True)
PREFIX = Kind(checks.prefix, "TEXT")
TOKEN_ID = Kind(checks.token_id, "ID", int)
TOKEN_IDS = Kind(checks.token_ids, "IDS", checks.parse_all_ids, repeated=True)
TOKEN_SEQUENCES = Kind(checks.token_sequences, "IDS", checks.parse_sequences, repeated=True)
LOGIT_BIAS = Kind(checks.logit_bias, "ID=X", checks.parse_biases, repeated=True)
LOGITS_PROCESSOR = Kind(checks.logits_processor)
DRAFT_MODEL = Kind(checks.draft_model, "FILE.onnx")
