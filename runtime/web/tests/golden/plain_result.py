"""A result of the Python runtime as plain values."""

from __future__ import annotations

from typing import Any

from tformer_runtime.decoding.request import Result


def plain(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "ids": result.token_ids,
        "score": result.score,
        "alternatives": [plain(one) for one in result.alternatives],
    }
