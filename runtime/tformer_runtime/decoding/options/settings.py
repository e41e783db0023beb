"""`Settings`: generation options with every value set, and the rules between options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options.option_table import CONSTRAINT_NAMES, OPTIONS, Constraint, GenerationOptions
from tformer_runtime.decoding.options.settings_fields import SettingsFields

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_GROUPS = ("num_beam_groups", "diversity_penalty")
_DRAFT = ("prompt_lookup", "draft_model", "num_draft_tokens")


class Settings(SettingsFields, frozen=True):
    """Generation options with every value set. The caller's options override the defaults of the model file, and these
    override the defaults of the table.

    Requests of equal settings can share a batch.
    """

    def __hash__(self) -> int:
        return hash(_HASHED(self))

    @property
    def sampling(self) -> bool:
        return self.temperature != 0 and any(getattr(self, name) is not None for name in _SAMPLING)

    @property
    def beams(self) -> bool:
        """Whether beam search chooses the tokens."""
        return self.num_beams > 1 and not self.sampling

    @property
    def speculates(self) -> bool:
        """Whether tokens are guessed ahead, by prompt lookup or by a draft model."""
        return self.prompt_lookup or self.draft_model is not None

    @property
    def width(self) -> int:
        """The rows of a batch that a request takes."""
        return max(self.num_beams, self.num_return_sequences)

    @property
    def constraint(self) -> tuple[Constraint, Any] | None:
        """The kind of the constraint and its definition."""
        return next(((kind, text) for kind in CONSTRAINT_NAMES if (text := getattr(self, kind)) is not None), None)

    @property
    def enough(self) -> int:
        """The number of complete hypotheses that ends a beam search."""
        return math.floor(self.num_beams * self.patience + 0.5)

    @classmethod
    def of(cls, options: GenerationOptions, defaults: Mapping[str, Any] | GenerationOptions) -> Settings:
        """Return the caller's options; without one, the default of the file; without that, the default of the table.

        defaults: of the file, or the options that `file_defaults` has made of them.
        Raise OptionError if options contradict each other, or if the file has a default that does not exist.
        """
        caller = options.to_dict()
        file = defaults.to_dict() if isinstance(defaults, GenerationOptions) else file_defaults(defaults)
        if caller.get("temperature") != 0 and any(name in caller for name in _SAMPLING):
            file = _without(file, ("num_beams", "num_return_sequences", "patience", *_GROUPS))
        elif caller.get("num_beams", 1) > 1:
            file = _without(file, (*_SAMPLING, *_DRAFT))
        elif "num_beams" in caller:
            file = _without(file, ("patience", *_GROUPS))
        if any(name in caller for name in CONSTRAINT_NAMES):
            file = _without(file, CONSTRAINT_NAMES)
        if "draft_model" in caller:
            file = _without(file, ("prompt_lookup",))
        settings = cls(**{**file, **caller})
        if not settings.speculates and "num_draft_tokens" in caller:
            raise OptionError(
                f"num_draft_tokens={settings.num_draft_tokens} needs prompt_lookup or a draft_model: set one of them",
                option="num_draft_tokens",
            )
        if "seed" in caller and "temperature" not in caller and not settings.sampling:
            raise OptionError(
                f"seed={settings.seed} changes nothing without sampling: set a temperature", option="seed"
            )
        settings._check()
        return settings

    def _check(self) -> None:
        if self.sampling and self.num_beams > 1:
            raise OptionError(f"num_beams={self.num_beams} and sampling ({', '.join(_SAMPLING)}) exclude each other")
        if not self.sampling and self.num_return_sequences > self.num_beams:
            raise OptionError(
                f"num_return_sequences={self.num_return_sequences} needs a num_beams of at least "
                f"{self.num_return_sequences}, or sampling",
                option="num_return_sequences",
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}",
                option="min_new_tokens",
            )
        if self.num_beams % self.num_beam_groups:
            raise OptionError(
                f"num_beam_groups={self.num_beam_groups} must divide num_beams, which is {self.num_beams}",
                option="num_beam_groups",
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise OptionError(
                f"diversity_penalty={self.diversity_penalty} needs a num_beam_groups of at least 2",
                option="diversity_penalty",
            )
        if self.num_beams > 1 and self.enough < self.num_return_sequences:
            raise OptionError(
                f"patience={self.patience} ends at {self.enough} hypotheses, fewer than "
                f"num_return_sequences={self.num_return_sequences}",
                option="patience",
            )
        if self.speculates and self.beams:
            guesses = "draft_model" if self.draft_model is not None else "prompt_lookup"
            raise OptionError(
                f"{guesses} guesses tokens for one row, but num_beams={self.num_beams} needs more rows: set "
                "num_beams=1, "
                f"or leave out {guesses}"
            )
        if self.forced_bos_token_id in self.suppress_tokens:
            raise OptionError(
                f"forced_bos_token_id={self.forced_bos_token_id} is one of the ids that suppress_tokens forbids",
                option="forced_bos_token_id",
            )


_HASHED = attrgetter(*(name for name in OPTIONS if name != "logits_processor"))  # a callable may have no hash


def file_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation defaults of a model file, of JSON or of Python, as options.

    Raise OptionError for an unknown option, an impossible value, or a value that a file cannot hold (function, model).
    """
    try:
        options = GenerationOptions(**defaults).to_dict()
        for name in options:
            if (not_in_json := OPTIONS[name].not_in_json) is not None:
                raise OptionError(f"{name} is {not_in_json[0]}, which a file cannot hold", option=name)
    except OptionError as error:
        raise OptionError(f"the model file's generation defaults: {error}") from error
    return options


def _without(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
