"""What the parity gate found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tformer_export.verify.end_to_end import RawParity

TOLERANCE = 1e-3  # of the logits' range


@dataclass
class ParityReport:
    """errors: case → max |Δlogit|. relative_error: the largest, over the logits' range. tokens: greedy, compared.

    forecast: of a series, the greatest |Δ| of a whole forecast, fed back step by step, as a share of its range;
    forecast_allowed: what it may be. extras: what the file gives beside logits → max |Δ|. device: what the file ran on.
    tolerance: of relative_error. exact_error: relative_error before the model was rounded to half precision, of such a
    file. raw: from texts to final results, of a model that is run once. ragged: whether its rows are the same beside
    longer ones, where it looked as if they were.
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
