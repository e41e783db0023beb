"""The result of the parity gate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tformer_export.verify.end_to_end import RawParity

TOLERANCE = 1e-3  # of the logits' range


@dataclass
class ParityReport:
    """The result of the parity gate.

    errors: case → max |Δlogit|.
    extras: extra output → max |Δ|.
    relative_error: the largest error, over the range of the logits.
    tokens, tokens_equal: the number of compared greedy tokens, and of equal ones.
    device: the device on which the file ran.
    tolerance: the allowed relative_error.
    exact_error: for half precision, relative_error before the model was rounded.
    forecast: for a series, the greatest |Δ| of a whole forecast, fed back step by step, over its range.
    forecast_allowed: its allowed value.
    raw: the comparison from raw inputs to final results, for a single-pass model.
    ragged: whether its rows have the same results next to longer rows, if the graph suggests so.
    """

    errors: dict[str, float] = field(default_factory=dict)
    extras: dict[str, float] = field(default_factory=dict)
    relative_error: float = 0.0
    tokens: int = 0
    tokens_equal: int = 0
    device: str = "cpu"
    tolerance: float = TOLERANCE
    exact_error: float | None = None
    forecast: float | None = None
    forecast_allowed: float | None = None
    raw: RawParity | None = None
    ragged: bool = True

    @property
    def max_abs_error(self) -> float:
        return max(self.errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "max_abs_error": self.max_abs_error}
