"""What quantisation may cost: `--max-degradation`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tformer_runtime.base.errors import OptionError


@dataclass(frozen=True)
class Meaning:
    """What a share is of. verb: what quantisation does to it. whole: "2 % …". unit: what is counted."""

    verb: str
    whole: str
    unit: str


TOKENS = Meaning("changes", "of the tokens", "tokens")
CLASSES = Meaning("changes", "of the classes", "rows")
COSINE = Meaning("takes", "off the mean cosine", "vectors")


@dataclass(frozen=True)
class Budget:
    """tokens: the largest share of best tokens that may be others than the unquantised file's, or the share of what
    `meaning` says. perplexity: how many times its perplexity may be that of the quantised one. None: any."""

    tokens: float | None = None
    perplexity: float | None = None
    meaning: Meaning = TOKENS

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
            f"max_degradation is a share such as 1% or 0.01, or times the perplexity such as 1.02x, not {given!r}"
        )

    def over(self, meaning: Meaning) -> Budget:
        """The same for a model that is run once, whose share is of something else. OptionError for a perplexity."""
        if self.perplexity is not None:
            raise OptionError(
                f"a model that is run once has no perplexity to be multiplied by {self.perplexity:g}: let "
                f"max_degradation be a share {meaning.whole}, such as 0.5%"
            )
        return replace(self, meaning=meaning)

    def exceeded(self, changed: float, perplexity_ratio: float = 1.0) -> str | None:
        """What is beyond the budget, as the middle of a sentence. changed: share of what `meaning` says."""
        if self.tokens is not None and not changed <= self.tokens:
            return f"{self.meaning.verb} {_share(changed)} {self.meaning.whole} and {_share(self.tokens)} is allowed"
        if self.perplexity is not None and not perplexity_ratio <= self.perplexity:
            return f"multiplies the perplexity by {perplexity_ratio:.4f} and {self.perplexity:g} is allowed"
        return None

    def __str__(self) -> str:
        if self.perplexity is not None:
            return f"{self.perplexity:g} times the perplexity"
        return f"{_share(self.tokens)} {self.meaning.whole}" if self.tokens is not None else "any degradation"


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.2%}"
