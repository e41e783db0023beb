"""The budget of quantisation: the loss of quality that `--max-degradation` allows."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tformer_runtime.base.errors import OptionError


@dataclass(frozen=True)
class QualityUnit:
    """The words for a share in messages: "quantisation changes 2 % of the tokens".

    verb: the effect of quantisation, such as "changes".
    whole: the quantity that the share refers to, such as "of the tokens".
    unit: the things that are counted, such as "tokens".
    """

    verb: str
    whole: str
    unit: str


TOKENS = QualityUnit("changes", "of the tokens", "tokens")
CLASSES = QualityUnit("changes", "of the classes", "rows")
COSINE = QualityUnit("takes", "off the mean cosine", "vectors")


@dataclass(frozen=True)
class DegradationBudget:
    """The greatest allowed loss against the unquantised file. None allows any.

    tokens: the share of positions where the top-1 token may differ, or the share of another quantity, by `measure`.
    perplexity: the allowed ratio of the perplexity to that of the unquantised file.
    measure: the quantity that `tokens` is a share of.
    """

    tokens: float | None = None
    perplexity: float | None = None
    measure: QualityUnit = TOKENS

    @classmethod
    def of(cls, value: float | str | DegradationBudget | None) -> DegradationBudget:
        """Parse 0.01 or "1%" as a share of tokens, "1.02x" as a ratio of perplexities. Raises OptionError otherwise."""
        if value is None or isinstance(value, DegradationBudget):
            return value or cls()
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(%|x|)\s*", str(value))
        number = float(match[1]) if match else 0.0
        unit = match[2] if match else None
        if unit == "x" and number >= 1:
            return cls(perplexity=number)
        share = number / 100 if unit == "%" else number
        if unit in ("", "%") and share <= 1:
            return cls(tokens=share)
        raise OptionError(
            f"max_degradation is a share such as 1% or 0.01, or times the perplexity such as 1.02x, not {value!r}"
        )

    @property
    def is_set(self) -> bool:
        """Whether the budget allows less than any loss."""
        return self.tokens is not None or self.perplexity is not None

    def with_unit(self, measure: QualityUnit) -> DegradationBudget:
        """Return the budget as a share of another quantity, for a single-pass model.

        Raises OptionError for a budget of perplexity, which such a model does not have.
        """
        if self.perplexity is not None:
            raise OptionError(
                f"a single-pass model has no perplexity to be multiplied by {self.perplexity:g}: let "
                f"max_degradation be a share {measure.whole}, such as 0.5%"
            )
        return replace(self, measure=measure)

    def exceeded(self, changed: float, perplexity_ratio: float = 1.0) -> str | None:
        """Return the excess over the budget, as the middle of a sentence; None within the budget.

        changed: the measured share, of the quantity `measure`. perplexity_ratio: the measured ratio.
        """
        if self.tokens is not None and not changed <= self.tokens:
            return f"{self.measure.verb} {_share(changed)} {self.measure.whole} and {_share(self.tokens)} is allowed"
        if self.perplexity is not None and not perplexity_ratio <= self.perplexity:
            return f"multiplies the perplexity by {perplexity_ratio:.4f} and {self.perplexity:g} is allowed"
        return None

    def __str__(self) -> str:
        if self.perplexity is not None:
            return f"{self.perplexity:g} times the perplexity"
        return f"{_share(self.tokens)} {self.measure.whole}" if self.tokens is not None else "any degradation"


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.2%}"
