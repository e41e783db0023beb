"""What a caller may ask of generation: `GenerationOptions`, checked here and nowhere else.

Every option is None until it is set. What the caller leaves open is taken from the file's own defaults, and what the
file leaves open from the table in `Settings`. Which of the three ways of decoding is meant follows from the options:

- sampling, if temperature, top_k or top_p is set and temperature is not 0;
- else beam search, if beam_size is more than 1;
- else greedy.

A caller who sets a sampling option overrules a beam size of the file, and the other way round; both set by one side
is an error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from tformer_runtime.errors import OptionError

EarlyStopping = bool | Literal["never"]
_SAMPLING = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate. OptionError if a value is impossible or a name is unknown.

    max_new_tokens: at most so many tokens, the end token included; by default as many as the model can hold.
    min_new_tokens: the end token may not come before so many others.
    beam_size: hypotheses kept at each step; 1 is greedy.
    num_return: results for one input: the best of beam_size hypotheses, or so many samples.
    length_penalty: a hypothesis scores its summed log-probability / length ** length_penalty.
    early_stopping: beam search ends for an input when beam_size hypotheses are complete and
        True: at once; False: no better one seems likely; "never": no better one is possible.
    temperature: logits are divided by it before drawing; 0 is greedy.
    top_k: draw from the k likeliest tokens only; 0 is no limit.
    top_p: draw from the fewest tokens whose probabilities sum to p or more.
    seed: the same seed draws the same tokens for the input of the same index, whatever is beside it in the batch.
    stop: the text ends before the first of these strings.
    alignments: give each result's alignments; the file must have been exported with them.
    hidden: give each result's hidden states; the file must have been exported with some.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    beam_size: int | None = None
    num_return: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    alignments: bool | None = None
    hidden: bool | None = None

    if not TYPE_CHECKING:  # type checkers know the names already

        def __new__(cls, *_: Any, **options: Any) -> GenerationOptions:
            names = [f.name for f in fields(cls)]
            for name in options:
                if name not in names:
                    close = difflib.get_close_matches(name, names, 1)
                    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
                    raise OptionError(f"there is no option {name!r}: {hint}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")
        self._check("temperature", lambda x: x >= 0, "0 or more")
        self._check("top_p", lambda x: 0 < x <= 1, "more than 0 and at most 1")
        self._check("length_penalty", lambda _: True, "a number")
        if not (self.early_stopping in (None, "never") or isinstance(self.early_stopping, bool)):
            raise OptionError(f'early_stopping must be True, False or "never", not {self.early_stopping!r}')
        for name in ("alignments", "hidden"):
            if not isinstance(getattr(self, name), (bool, NoneType)):
                raise OptionError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.stop is not None:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            if not all(isinstance(s, str) and s for s in stop):
                raise OptionError(f"stop must be strings that are not empty, not {self.stop!r}")
            object.__setattr__(self, "stop", stop)

    def _check(self, name: str, holds: Any, what: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (number and holds(value)):
            raise OptionError(f"{name} must be {what}, not {value!r}")

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def with_(self, overrides: Mapping[str, Any]) -> GenerationOptions:
        """These options with others set on top."""
        return GenerationOptions(**{**self.given(), **overrides}) if overrides else self


_LEAST = {"max_new_tokens": 1, "min_new_tokens": 0, "beam_size": 1, "num_return": 1, "top_k": 0, "seed": 0}


@dataclass(frozen=True)
class Settings:
    """Options with nothing left open: the caller's over the file's over the values below."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    beam_size: int = 1
    num_return: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    alignments: bool = False
    hidden: bool = False

    @property
    def sampling(self) -> bool:
        return self.temperature != 0 and any(getattr(self, name) is not None for name in _SAMPLING)

    @classmethod
    def of(cls, options: GenerationOptions, defaults: Mapping[str, Any]) -> Settings:
        """OptionError if the options contradict each other or the file's defaults are none that exist."""
        mine = options.given()
        try:
            files = GenerationOptions(**defaults).given()
        except OptionError as error:
            raise OptionError(f"the model file's generation defaults: {error}") from error
        if mine.get("temperature") != 0 and any(name in mine for name in _SAMPLING):
            files = {name: value for name, value in files.items() if name not in ("beam_size", "num_return")}
        elif mine.get("beam_size", 1) > 1:
            files = {name: value for name, value in files.items() if name not in _SAMPLING}
        settings = cls(**{**files, **mine})
        settings._check()
        return settings

    def _check(self) -> None:
        if self.sampling and self.beam_size > 1:
            raise OptionError(
                f"beam_size={self.beam_size} and sampling (temperature, top_k, top_p) cannot be had at once"
            )
        if not self.sampling and self.num_return > self.beam_size:
            raise OptionError(
                f"num_return={self.num_return} needs a beam_size of at least {self.num_return}, or sampling"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
