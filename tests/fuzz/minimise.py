"""Make the case of a finding smaller, as long as the finding stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fuzz.supervisor import Finding, run_target

MAX_TRIES = 2000
MAX_SECONDS = 300.0


def smaller_case(name: str, finding: Finding) -> bytes:
    """Return a case with a finding of the same place. Parts of a JSON document, else runs of bytes, are left out."""
    case, tries = finding.case, 0
    changed = True
    while changed and tries < MAX_TRIES:
        changed = False
        candidates = list(_smaller(case))
        while candidates and tries < MAX_TRIES:
            batch, candidates = candidates[:40], candidates[40:]
            tries += len(batch)
            found = run_target(name, 0, len(batch), MAX_SECONDS, batch).findings.get(finding.place)
            if found is not None:
                case, changed = found.case, True
                break
    return case


def _smaller(case: bytes) -> Iterator[bytes]:
    try:
        document = json.loads(case)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, (dict, list)):
        for smaller in _smaller_values(document):
            yield json.dumps(smaller).encode()
        return
    size = len(case) // 2
    while size:
        for begin in range(0, len(case), size):
            yield case[:begin] + case[begin + size :]
        size //= 2 if size > len(case) // 64 else size + 1


def _smaller_values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield {other: part for other, part in value.items() if other != key}
        for key in value:
            for part in _smaller_values(value[key]):
                yield {**value, key: part}
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index in range(len(value)):
            for part in _smaller_values(value[index]):
                yield [*value[:index], part, *value[index + 1 :]]
    elif isinstance(value, str) and len(value) > 1:
        yield value[: len(value) // 2]
        yield value[len(value) // 2 :]
        yield value[1:]
        yield value[:-1]
