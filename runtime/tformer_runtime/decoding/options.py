"""The options of generation: one table for the Python API, the checks, the command line and the documentation.

`GenerationOptions` is the table: each field holds its heading, its help text, its check, its default and its form on
the command line. `Settings` are options with every value set: the caller's options override the defaults of the model
file, and these override the defaults of the table.

The options decide how tokens are chosen:

- sampling, if temperature, top_k, top_p or min_p is set and temperature is not 0;
- otherwise beam search, if num_beams is more than 1;
- otherwise greedy decoding.

A sampling option of the caller overrides num_beams of the file, and the other way round. An error follows if the caller
sets both. The same holds for the constraints. Only one can be set.

To add an option:

1. Write its check in `option_checks`, and a parser of its text, if none there fits.
2. Add the field to `GenerationOptions`, at its place in the documentation. The flag of `tformer-run`, its help and the
   tables of the documentation are made of it. An option without a metavar has no flag there: `cli/generation.py` adds
   one by hand.
3. Add the field to `Settings` at the same place, with the type of a checked value.
4. If it excludes other options, say so in `Settings._check`, or in `Settings.of` if a caller's option removes the
   file's. If no file can hold its value, add it to `_NOT_IN_FILES`.
5. Read the setting where it has its effect: a rule in `logit_rules.make_rules` (also in the order of that module's
   docstring), a distribution in `sampling`, a length in `request.make_request`, an output in `request.Result` and
   `Generator.make_result`. If it needs something of the file, check that in `Model.settings`.
6. For an output, write it in `_GenerationJob._fields` of `cli/generation.py`; `_check` there says which flags it needs.
7. If transformers' GenerationConfig has it, add it to the options that `tformer_export` reads of a folder
   (`_SHARED_OPTIONS` in `sources/hugging_face/folder.py`).
8. Add its name to the message in `docs/options.md`, and describe it in `docs/generation.md`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding import option_checks as check
from tformer_runtime.decoding.option_checks import Check, EarlyStopping, HasEngine, LogitsProcessor

Constraint = Literal["regex", "json_schema", "grammar", "choices"]

MAX_WIDTH = 4096  # rows of a request: each has a cache of its own

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_GROUPS = ("num_beam_groups", "diversity_penalty")
_DRAFT = ("prompt_lookup", "draft_model", "num_draft_tokens")
_CONSTRAINTS: tuple[Constraint, ...] = get_args(Constraint)
_NOT_IN_FILES = {"logits_processor": "a callable", "draft_model": "a model"}

LENGTH = "Where a text begins and ends"
BEAM_SEARCH = "Beam search"
SAMPLING = "Sampling"
TOKEN_RULES = "Which tokens are allowed and preferred"
CONSTRAINTS = "Constraints (at most one)"
SPECULATION = "Speculation"
ADAPTERS = "Adapters"
OUTPUT = "Additional output"


class GenerationOptionSpec(msgspec.Struct, frozen=True):
    """One generation option.

    heading: the group of options that it belongs to.
    help: one or more sentences. They name other options in backticks by their Python names; the command line replaces
        these by its flags.
    check: see `option_checks`.
    default: the value that holds if neither the caller nor the file sets one.
    metavar: the name of the value on the command line; "" for a switch, None if the option is for Python alone.
    parse: from the text of the command line to a value; from all texts, as a tuple, if `repeated`.
    flag: the name on the command line.
    """

    heading: str
    help: str
    check: Check
    default: Any
    metavar: str | None
    parse: Callable[[Any], Any]
    repeated: bool
    flag: str | None


def _option(
    heading: str,
    help: str,
    check: Check,
    default: Any = None,
    metavar: str | None = None,
    parse: Callable[[Any], Any] = str,
    repeated: bool = False,
    flag: str | None = None,
    hash: bool | None = None,
) -> Any:
    spec = GenerationOptionSpec(heading, help, check, default, metavar, parse, repeated, flag)
    return field(default=None, metadata={"option": spec}, hash=hash)


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one generation request. Names are those of transformers' GenerationConfig where it has the option.

    A sampling option switches sampling on without `do_sample`. None leaves an option to the model file, and then to the
    default of the table.

    An impossible value or an unknown name raises OptionError. Lists become tuples, logit_bias becomes a tuple of
    pairs sorted by id, and json_schema becomes JSON text, so that options can be compared and hashed.
    """

    max_new_tokens: int | None = _option(
        LENGTH,
        "Generate at most this many tokens, the end token included; by default as many as the model can hold.",
        check.whole_number(1),
        None,
        "N",
        int,
    )
    min_new_tokens: int | None = _option(
        LENGTH, "Forbid the end token before this many other tokens.", check.whole_number(0), 0, "N", int
    )
    stop_strings: str | Sequence[str] | None = _option(
        LENGTH, "End the text before the first of these strings.", check.stop_strings, (), "TEXT", list, True
    )
    forced_prefix: str | Sequence[int] | None = _option(
        LENGTH,
        "Begin each result with this text or these ids. The prefix is part of the result and counts as prompt. It "
        "follows the id of `forced_bos_token_id`, if that is set.",
        check.prefix,
        (),
        "TEXT",
    )
    forced_bos_token_id: int | None = _option(
        LENGTH,
        "Begin each result with this id, such as the target language of a multilingual translator.",
        check.token_id,
        None,
        "ID",
        int,
    )
    num_beams: int | None = _option(
        BEAM_SEARCH,
        "Keep this many hypotheses at each step; 1 is greedy.",
        check.whole_number(1, MAX_WIDTH),
        1,
        "N",
        int,
    )
    num_return_sequences: int | None = _option(
        BEAM_SEARCH,
        "Return this many results for each input: the best hypotheses of beam search, or samples.",
        check.whole_number(1, MAX_WIDTH),
        1,
        "N",
        int,
    )
    length_penalty: float | None = _option(
        BEAM_SEARCH,
        "Divide the log-probability of a hypothesis by length ** X.",
        check.number("a number from -50 to 50", lambda x: -50 <= x <= 50),
        1.0,
        "X",
        float,
    )
    early_stopping: EarlyStopping | None = _option(
        BEAM_SEARCH,
        "When enough hypotheses are complete: true stops at once, false stops when a better one is unlikely, never "
        "stops when a better one is impossible.",
        check.early_stopping,
        False,
        "true|false|never",
        check.parse_early_stopping,
    )
    patience: float | None = _option(
        BEAM_SEARCH,
        "Set how many complete hypotheses are enough: X times `num_beams`, rounded (Kasai et al. 2022).",
        check.number("more than 0 and at most 1000", lambda x: 0 < x <= 1000),
        1.0,
        "X",
        float,
    )
    num_beam_groups: int | None = _option(
        BEAM_SEARCH,
        "Split the beams into this many groups, which are searched one after another at each step.",
        check.whole_number(1),
        1,
        "N",
        int,
    )
    diversity_penalty: float | None = _option(
        BEAM_SEARCH,
        "Subtract X from a token's log-probability for each beam of the earlier groups that has just chosen it "
        "(Vijayakumar et al. 2016).",
        check.number("0 or more", lambda x: x >= 0),
        0.0,
        "X",
        float,
    )
    temperature: float | None = _option(
        SAMPLING,
        "Divide logits by X and sample; 0 is greedy.",
        check.number("0, or a number of at least 1e-6", lambda x: x == 0 or x >= 1e-6),  # less overflows float64
        None,
        "X",
        float,
    )
    top_k: int | None = _option(
        SAMPLING, "Sample from the N likeliest tokens; 0 is no limit.", check.whole_number(0), None, "N", int
    )
    top_p: float | None = _option(
        SAMPLING,
        "Sample from the fewest tokens whose probabilities sum to X or more.",
        check.number("more than 0 and at most 1", lambda x: 0 < x <= 1),
        None,
        "X",
        float,
    )
    min_p: float | None = _option(
        SAMPLING,
        "Sample from the tokens that are at least X times as likely as the likeliest one.",
        check.number("at least 0 and at most 1", lambda x: 0 <= x <= 1),
        None,
        "X",
        float,
    )
    seed: int | None = _option(
        SAMPLING,
        "Seed the random numbers. With a seed, an input draws the same tokens in each run where it has the same "
        "number, whatever else the batch holds.",
        check.whole_number(0, 2**64 - 1),
        None,
        "N",
        int,
    )
    suppress_tokens: Sequence[int] | None = _option(
        TOKEN_RULES, "Never generate these ids (5,9).", check.token_ids, (), "IDS", check.parse_all_ids, True
    )
    begin_suppress_tokens: Sequence[int] | None = _option(
        TOKEN_RULES,
        "Do not begin with these ids. With `forced_bos_token_id` this holds for the token after it.",
        check.token_ids,
        (),
        "IDS",
        check.parse_all_ids,
        True,
    )
    bad_words_ids: Sequence[Sequence[int]] | None = _option(
        TOKEN_RULES,
        "Never generate these ids one after another. A single end token is ignored: use `suppress_tokens`.",
        check.token_sequences,
        (),
        "IDS",
        check.parse_sequences,
        True,
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = _option(
        TOKEN_RULES, "Add X to the logit of an id.", check.logit_bias, (), "ID=X", check.parse_biases, True
    )
    repetition_penalty: float | None = _option(
        TOKEN_RULES,
        "Divide positive logits of all ids so far, the prompt included, by X, and multiply negative ones.",
        check.number("more than 0", lambda x: x > 0),
        1.0,
        "X",
        float,
    )
    presence_penalty: float | None = _option(
        TOKEN_RULES,
        "Subtract X from the logit of each id that has been generated.",
        check.number("a number"),
        0.0,
        "X",
        float,
    )
    frequency_penalty: float | None = _option(
        TOKEN_RULES,
        "Subtract X from the logit of an id for each time that it has been generated.",
        check.number("a number"),
        0.0,
        "X",
        float,
    )
    no_repeat_ngram_size: int | None = _option(
        TOKEN_RULES,
        "Never repeat a sequence of N ids, the prompt included; 0 is no limit.",
        check.whole_number(0),
        0,
        "N",
        int,
    )
    logits_processor: LogitsProcessor | None = _option(
        TOKEN_RULES,
        "A callable (ids so far, float32 logits (vocabulary,)) → logits of that shape. Beam search passes "
        "log-probabilities. The arrays are copies.",
        check.logits_processor,
        hash=False,  # a callable may have no hash
    )
    regex: str | None = _option(
        CONSTRAINTS,
        "The whole text matches this regular expression, unless `max_new_tokens` or a stop string ends it earlier.",
        check.text,
        None,
        "PATTERN",
    )
    json_schema: str | Mapping[str, Any] | None = _option(
        CONSTRAINTS,
        "The text is JSON of this JSON schema.",
        check.json_schema,
        None,
        "JSON|@FILE",
        check.parse_text_or_file,
    )
    grammar: str | None = _option(
        CONSTRAINTS,
        "The text belongs to this grammar, in Lark's notation.",
        check.text,
        None,
        "LARK|@FILE",
        check.parse_text_or_file,
    )
    choices: Sequence[str] | None = _option(
        CONSTRAINTS, "The text is one of these strings.", check.choices, None, "TEXT", list, True, "--choice"
    )
    prompt_lookup: bool | None = _option(
        SPECULATION,
        "Guess the next tokens: look up the latest ones in the prompt, the source and the result, and propose what "
        "followed them. The model checks each guess, so that greedy results stay the same and samples keep their "
        "distribution. Not for beam search.",
        check.boolean,
        False,
        "",
        bool,
    )
    draft_model: HasEngine | None = _option(
        SPECULATION,
        "Guess the next tokens with a smaller model of the same vocabulary, loaded with one thread.",
        check.draft_model,
        None,
        "FILE.onnx",
    )
    num_draft_tokens: int | None = _option(
        SPECULATION,
        "Guess at most this many tokens at once. The number adapts to the share of correct guesses.",
        check.whole_number(1),
        10,
        "N",
        int,
    )
    adapter: str | None = _option(
        ADAPTERS,
        "Use this adapter of the file, by its name; base is the model without any.",
        check.text,
        None,
        "NAME",
    )
    shortlist: bool | None = _option(
        OUTPUT,
        "For a file with a shortlist, a table of the target ids that are likely for each source id. True (the "
        "default) computes the logits of these candidates only, which is faster; False computes the logits of all ids. "
        "Ids in `forced_prefix`, `forced_bos_token_id` and `logit_bias` are always candidates. With a constraint or a "
        "`logits_processor` all ids are candidates. Log-probabilities are normalised over the candidates.",
        check.boolean,
        True,
    )
    top_logprobs: int | None = _option(
        OUTPUT,
        "Return the N likeliest tokens at each position with their log-probabilities.",
        check.whole_number(0),
        0,
        "N",
        int,
    )
    cross_attentions: bool | None = _option(
        OUTPUT,
        "Return the cross-attention weights of each result. The file must have been exported with them.",
        check.boolean,
        False,
    )
    hidden_states: bool | None = _option(
        OUTPUT,
        "Return the hidden states of each result. The file must have been exported with some.",
        check.boolean,
        False,
    )

    if not TYPE_CHECKING:  # type checkers know the names already

        def __new__(cls, *_: Any, **options: Any) -> GenerationOptions:
            for name in options:
                if name not in OPTIONS:
                    from tformer_runtime.base.factory_arguments import nearest_name  # only a wrong name needs it

                    near = nearest_name(name, OPTIONS)
                    hint = f"did you mean {near}?" if near else f"there are {', '.join(OPTIONS)}"
                    raise OptionError(f"there is no option {name!r}: {hint}", option=name)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            object.__setattr__(self, name, OPTIONS[name].check(name, value))
        for names in (_CONSTRAINTS, _DRAFT[:2]):
            exclusive = [name for name in names if getattr(self, name)]
            if len(exclusive) > 1:
                raise OptionError(f"{' and '.join(exclusive)} exclude each other: set one")

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def replace(self, overrides: Mapping[str, Any]) -> GenerationOptions:
        """Return these options with the overrides on top. An override of None removes an option."""
        return GenerationOptions(**{**self.to_dict(), **overrides}) if overrides else self


OPTIONS: dict[str, GenerationOptionSpec] = {f.name: f.metadata["option"] for f in fields(GenerationOptions)}
"""The table: name → option, in the order of the documentation."""


def _documented() -> str:
    """Return the docstring of `GenerationOptions` with its table, for `help()`."""
    lines = [(GenerationOptions.__doc__ or "").rstrip()]
    for heading in dict.fromkeys(spec.heading for spec in OPTIONS.values()):
        lines.append(f"\n    {heading}:\n")
        for name, spec in OPTIONS.items():
            if spec.heading == heading:
                lines.append(
                    textwrap.fill(f"{name}: {spec.help}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
                )
    return "\n".join(lines) + "\n"


GenerationOptions.__doc__ = _documented()


def _default(name: str) -> Any:
    return OPTIONS[name].default


class Settings(msgspec.Struct, frozen=True):
    """Generation options with every value set. The defaults are those of the table.

    Requests of equal settings can share a batch.
    """

    # Each option is repeated because its type differs: here no value is None that only stands for a default, and values
    # have the form after the check. A class made of the table would have no types for a type checker. A test compares
    # the names.

    max_new_tokens: int | None = _default("max_new_tokens")
    min_new_tokens: int = _default("min_new_tokens")
    stop_strings: tuple[str, ...] = _default("stop_strings")
    forced_prefix: str | tuple[int, ...] = _default("forced_prefix")
    forced_bos_token_id: int | None = _default("forced_bos_token_id")
    num_beams: int = _default("num_beams")
    num_return_sequences: int = _default("num_return_sequences")
    length_penalty: float = _default("length_penalty")
    early_stopping: EarlyStopping = _default("early_stopping")
    patience: float = _default("patience")
    num_beam_groups: int = _default("num_beam_groups")
    diversity_penalty: float = _default("diversity_penalty")
    temperature: float | None = _default("temperature")
    top_k: int | None = _default("top_k")
    top_p: float | None = _default("top_p")
    min_p: float | None = _default("min_p")
    seed: int | None = _default("seed")
    suppress_tokens: tuple[int, ...] = _default("suppress_tokens")
    begin_suppress_tokens: tuple[int, ...] = _default("begin_suppress_tokens")
    bad_words_ids: tuple[tuple[int, ...], ...] = _default("bad_words_ids")
    logit_bias: tuple[tuple[int, float], ...] = _default("logit_bias")
    repetition_penalty: float = _default("repetition_penalty")
    presence_penalty: float = _default("presence_penalty")
    frequency_penalty: float = _default("frequency_penalty")
    no_repeat_ngram_size: int = _default("no_repeat_ngram_size")
    logits_processor: LogitsProcessor | None = _default("logits_processor")
    regex: str | None = _default("regex")
    json_schema: str | None = _default("json_schema")
    grammar: str | None = _default("grammar")
    choices: tuple[str, ...] | None = _default("choices")
    prompt_lookup: bool = _default("prompt_lookup")
    draft_model: HasEngine | None = _default("draft_model")
    num_draft_tokens: int = _default("num_draft_tokens")
    adapter: str | None = _default("adapter")
    shortlist: bool = _default("shortlist")
    top_logprobs: int = _default("top_logprobs")
    cross_attentions: bool = _default("cross_attentions")
    hidden_states: bool = _default("hidden_states")

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
        return next(((kind, text) for kind in _CONSTRAINTS if (text := getattr(self, kind)) is not None), None)

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
        if any(name in caller for name in _CONSTRAINTS):
            file = _without(file, _CONSTRAINTS)
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

    Raise OptionError for an unknown option, an impossible value, or a value that a file cannot hold (callable, model).
    """
    try:
        options = GenerationOptions(**defaults).to_dict()
        for name, kind in _NOT_IN_FILES.items():
            if name in options:
                raise OptionError(f"{name} is {kind}, which a file cannot hold", option=name)
    except OptionError as error:
        raise OptionError(f"the model file's generation defaults: {error}") from error
    return options


def _without(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
