"""Settings of a tokenizer that the tokenizers package reads and then fails with.

A normalizer that writes ten characters for one, nine times in a row, takes a gigabyte for a character, and the package
then ends the process. With other settings the package panics, and writes a trace to standard error. Settings that fail
with each text are refused here. Two kinds are left to the package. A check of a character map or of merges would take
as long as to read them. A decoder that strips trailing characters fails only with a text that is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tformer_runtime.base.errors import ModelFileError

MAX_GROWTH = 1024  # characters for one; tokenizers of published models stay below 120
_GROWTH = {
    "NFKD": 18,
    "NFKC": 18,
    "Precompiled": 18,
    "NFD": 4,
    "NFC": 3,
    "ByteLevel": 2,
    "Metaspace": 3,
    "Lowercase": 3,
}


def check_growth(parts: dict[str, Any]) -> None:
    """Raise ModelFileError for a tokenizer that may make a text more than MAX_GROWTH times as long.

    parts: its JSON.
    """
    for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth = 1.0
        for step in _steps(parts.get(stage)):
            growth *= _growth_of(step)
            if growth > MAX_GROWTH:
                raise ModelFileError(
                    f"the file's tokenizer may make a text more than {MAX_GROWTH} times as long ({stage})"
                )


def check_settings(parts: dict[str, Any]) -> None:
    """Raise ModelFileError for a setting with which the package panics at each text. parts: the tokenizer's JSON."""
    for stage in ("pre_tokenizer", "post_processor"):
        for step in _steps(parts.get(stage)):
            if reason := _panic_reason(step):
                raise ModelFileError(f"the file's tokenizer has a broken {stage} ({reason}): export the model again")


def _panic_reason(step: dict[str, Any]) -> str | None:
    if step.get("type") == "FixedLength" and step.get("length") == 0:
        return "the length of its pieces is 0"
    if step.get("type") == "TemplateProcessing":
        single, pair = step.get("single") or [], step.get("pair") or []
        if any("Sequence" in item and item["Sequence"].get("id") == "B" for item in single):
            return "its template of one text has a second text"
        known = step.get("special_tokens") or {}
        names = [item["SpecialToken"].get("id") for item in [*single, *pair] if "SpecialToken" in item]
        if unknown := [name for name in names if name not in known]:
            return f"its template has the token {unknown[0]!r:.80}, whose ids are missing"
    return None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer, also those of sequences within it."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            waiting += [item for value in step.values() if isinstance(value, list) for item in value]
            waiting += [value for value in step.values() if isinstance(value, dict)]


def _growth_of(step: dict[str, Any]) -> float:
    """Return a bound on the length of a step's output, in multiples of its input's."""
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern")
        found = pattern.get("String", "") if isinstance(pattern, dict) else ""  # a regular expression may match nothing
        return max(1.0, (len(str(step.get("content", ""))) + (not found)) / max(1, len(found)))
    if kind == "TemplateProcessing":
        texts = [sum("Sequence" in item for item in step.get(name) or []) for name in ("single", "pair")]
        return float(max(1, *texts))
    return float(_GROWTH.get(str(kind), 1))
