"""What quantisation may cost: `--max-degradation`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tformer_runtime.errors import OptionError


@dataclass(frozen=True)
class Budget:
    """tokens: the largest share of best tokens that may be others than the unquantised file's. perplexity: how many
    times its perplexity may be that of the quantised one. None: any."""

    tokens: float | None = None
    perplexity: float | None = None

    @classmethod
    def of(cls, given: float | str | Budget | None) -> Budget:
        """0.01 or "1%": of the tokens; "1.02x": times the perplexity. OptionError for anything else."""
        if given is None or isinstance(given, Budget):
            return given or cls()
        found = re.fullmatch(r"\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(%|x|)\s*", str(given))
        number = float(found[1]) if found else 0.0
        unit = found[2] if found else None
        if unit == "x" and number >= 1:
            return cls(perplexity=number)
        share = number / 100 if unit == "%" else number
        if unit in ("", "%") and share <= 1:
            return cls(tokens=share)
        raise OptionError(
            f"max_degradation is a share of tokens such as 1% or 0.01, or times the perplexity such as 1.02x, not "
            f"{given!r}"
        )

    def allows(self, changed: float, perplexity_ratio: float) -> bool:
        """changed: share of tokens."""
        return self.exceeded(changed, perplexity_ratio) is None

    def exceeded(self, changed: float, perplexity_ratio: float) -> str | None:
        """What is beyond the budget, as the middle of a sentence."""
        if self.tokens is not None and changed > self.tokens:
            return f"changes {_share(changed)} of the tokens and {_share(self.tokens)} is allowed"
        if self.perplexity is not None and not perplexity_ratio <= self.perplexity:
            return f"multiplies the perplexity by {perplexity_ratio:.4f} and {self.perplexity:g} is allowed"
        return None

    def __str__(self) -> str:
        if self.perplexity is not None:
            return f"{self.perplexity:g} times the perplexity"
        return f"{_share(self.tokens)} of the tokens" if self.tokens is not None else "any degradation"


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.2%}"
