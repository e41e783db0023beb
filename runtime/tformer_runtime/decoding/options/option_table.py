"""The options of generation: one table for all interfaces.

`GenerationOptions` is the table: each field holds its heading, its help text, its kind and its default. The checks, the
flags of `tformer-run`, the bodies of `tformer-serve`, the options that the exporter reads of a generation config, and
the tables of the documentation are made from it. `make options` writes two files from it: `settings_fields.py`, and
`optionTable.ts` of the package for browsers. A test compares them with the table.

The options decide how tokens are chosen:

- sampling, if temperature, top_k, top_p or min_p is set and temperature is not 0;
- otherwise beam search, if num_beams is more than 1;
- otherwise greedy decoding.

A sampling option of the caller overrides num_beams of the file, and the other way round. An error follows if the caller
sets both. The same holds for the constraints. Only one can be set.

To add an option:

1. Add the field to `GenerationOptions`, at its place in the documentation, and run `make options`. If no kind fits, add
   one to `option_kinds`, with its check in `option_checks`; for browsers also to `optionChecks.ts`, and its types to
   `runtime/write_options.py`.
2. Read the setting where it has its effect: a rule in `logit_rules.make_rules`, a distribution in `sampling`, a length
   in `request.make_request`, an output in `request.Result`, in `Generator.make_result` and in the fields of
   `cli.generation`. If the option contradicts others, say so in `Settings`. If it needs something of the file, check
   that in `Model.settings`. The package for browsers has the same modules; `web` is for an option that it lacks.
3. Describe the option in `docs/generation.md`.
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import option_checks as checks
from tformer_runtime.decoding.options import option_kinds as kinds
from tformer_runtime.decoding.options.option_checks import EarlyStopping, HasEngine, LogitsProcessor
from tformer_runtime.decoding.options.option_kinds import Kind

Constraint = Literal["regex", "json_schema", "grammar", "choices"]
CONSTRAINT_NAMES: tuple[Constraint, ...] = get_args(Constraint)

MAX_WIDTH = 4096  # rows of a request: each has a cache of its own

LENGTH = "Where a text begins and ends"
BEAM_SEARCH = "Beam search"
SAMPLING = "Sampling"
TOKEN_RULES = "Which tokens are allowed and preferred"
CONSTRAINTS = "Constraints (at most one)"
SPECULATION = "Speculation"
ADAPTERS = "Adapters"
OUTPUT = "Additional output"

_WEB_CONSTRAINT = "run the model with the Python runtime for constraints"
_WEB_SPECULATION = "leave it out: results are the same without speculation"


class GenerationOptionSpec(msgspec.Struct, frozen=True):
    """One generation option.

    heading: the group of options that it belongs to.
    help: one or more sentences. They name other options in backticks by their Python names; the command line replaces
        these by its flags.
    kind: the check of its value, and the form of the value on the command line.
    default: the value that holds if neither the caller nor the file sets one.
    flag: the name on the command line, if it differs from the option's.
    flag_help: the help text of the flag, for a flag that sets another value than its own.
    json_only: whether `tformer-run` shows it in the results of --json alone.
    in_transformers: whether the exporter copies it from transformers' GenerationConfig, whatever else that sets.
    web: the advice for the option in browsers, if their runtime lacks it.
    not_in_json: for a value that neither a file nor a request can hold: its kind, and the advice for a request.
    """

    heading: str
    help: str
    kind: Kind
    default: Any = None
    flag: str | None = None
    flag_help: str | None = None
    json_only: bool = False
    in_transformers: bool = False
    web: str | None = None
    not_in_json: tuple[str, str] | None = None


def _option(
    heading: str, help: str, kind: Kind, default: Any = None, *, hash: bool | None = None, **others: Any
) -> Any:
    """Return the field of an option. Arguments: see `GenerationOptionSpec`; hash: see `dataclasses.field`."""
    return field(
        default=None, metadata={"option": GenerationOptionSpec(heading, help, kind, default, **others)}, hash=hash
    )


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
        kinds.whole_number(1),
        in_transformers=True,
    )
    min_new_tokens: int | None = _option(
        LENGTH,
        "Forbid the end token before this many other tokens.",
        kinds.whole_number(0),
        0,
        in_transformers=True,
    )
    stop_strings: str | Sequence[str] | None = _option(
        LENGTH, "End the text before the first of these strings.", kinds.STOP_STRINGS, (), in_transformers=True
    )
    forced_prefix: str | Sequence[int] | None = _option(
        LENGTH,
        "Begin each result with this text or these ids. The prefix is part of the result and counts as prompt. It "
        "follows the id of `forced_bos_token_id`, if that is set.",
        kinds.PREFIX,
        (),
    )
    forced_bos_token_id: int | None = _option(
        LENGTH,
        "Begin each result with this id, such as the target language of a multilingual translator.",
        kinds.TOKEN_ID,
    )
    num_beams: int | None = _option(
        BEAM_SEARCH,
        "Keep this many hypotheses at each step; 1 is greedy.",
        kinds.whole_number(1, MAX_WIDTH),
        1,
        in_transformers=True,
    )
    num_return_sequences: int | None = _option(
        BEAM_SEARCH,
        "Return this many results for each input: the best hypotheses of beam search, or samples.",
        kinds.whole_number(1, MAX_WIDTH),
        1,
        in_transformers=True,
    )
    length_penalty: float | None = _option(
        BEAM_SEARCH,
        "Divide the log-probability of a hypothesis by length ** X.",
        kinds.number("a number from -50 to 50", minimum=-50, maximum=50),
        1.0,
        in_transformers=True,
    )
    early_stopping: EarlyStopping | None = _option(
        BEAM_SEARCH,
        "When enough hypotheses are complete: true stops at once, false stops when a better one is unlikely, never "
        "stops when a better one is impossible.",
        kinds.EARLY_STOPPING,
        False,
        in_transformers=True,
    )
    patience: float | None = _option(
        BEAM_SEARCH,
        "Set how many complete hypotheses are enough: X times `num_beams`, rounded (Kasai et al. 2022).",
        kinds.number("more than 0 and at most 1000", above=0, maximum=1000),
        1.0,
    )
    num_beam_groups: int | None = _option(
        BEAM_SEARCH,
        "Split the beams into this many groups, which are searched one after another at each step.",
        kinds.whole_number(1),
        1,
        in_transformers=True,
    )
    diversity_penalty: float | None = _option(
        BEAM_SEARCH,
        "Subtract X from a token's log-probability for each beam of the earlier groups that has just chosen it "
        "(Vijayakumar et al. 2016).",
        kinds.number("0 or more", minimum=0),
        0.0,
        in_transformers=True,
    )
    temperature: float | None = _option(
        SAMPLING,
        "Divide logits by X and sample; 0 is greedy.",
        kinds.number("0, or a number of at least 1e-6", minimum=1e-6, or_zero=True),  # less overflows float64
    )
    top_k: int | None = _option(SAMPLING, "Sample from the N likeliest tokens; 0 is no limit.", kinds.whole_number(0))
    top_p: float | None = _option(
        SAMPLING,
        "Sample from the fewest tokens whose probabilities sum to X or more.",
        kinds.number("more than 0 and at most 1", above=0, maximum=1),
    )
    min_p: float | None = _option(
        SAMPLING,
        "Sample from the tokens that are at least X times as likely as the likeliest one.",
        kinds.number("at least 0 and at most 1", minimum=0, maximum=1),
    )
    seed: int | None = _option(
        SAMPLING,
        "Seed the random numbers. With a seed, an input draws the same tokens in each run where it has the same "
        "number, whatever else the batch holds.",
        kinds.whole_number(0, 2**64 - 1),
    )
    suppress_tokens: Sequence[int] | None = _option(
        TOKEN_RULES, "Never generate these ids (5,9).", kinds.TOKEN_IDS, (), in_transformers=True
    )
    begin_suppress_tokens: Sequence[int] | None = _option(
        TOKEN_RULES,
        "Do not begin with these ids. With `forced_bos_token_id` this holds for the token after it.",
        kinds.TOKEN_IDS,
        (),
        in_transformers=True,
    )
    bad_words_ids: Sequence[Sequence[int]] | None = _option(
        TOKEN_RULES,
        "Never generate these ids one after another. A single end token is ignored: use `suppress_tokens`.",
        kinds.TOKEN_SEQUENCES,
        (),
        in_transformers=True,
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = _option(
        TOKEN_RULES, "Add X to the logit of an id.", kinds.LOGIT_BIAS, ()
    )
    repetition_penalty: float | None = _option(
        TOKEN_RULES,
        "Divide positive logits of all ids so far, the prompt included, by X, and multiply negative ones.",
        kinds.number("more than 0", above=0),
        1.0,
        in_transformers=True,
    )
    presence_penalty: float | None = _option(
        TOKEN_RULES,
        "Subtract X from the logit of each id that has been generated.",
        kinds.number("a number"),
        0.0,
    )
    frequency_penalty: float | None = _option(
        TOKEN_RULES,
        "Subtract X from the logit of an id for each time that it has been generated.",
        kinds.number("a number"),
        0.0,
    )
    no_repeat_ngram_size: int | None = _option(
        TOKEN_RULES,
        "Never repeat a sequence of N ids, the prompt included; 0 is no limit.",
        kinds.whole_number(0),
        0,
        in_transformers=True,
    )
    logits_processor: LogitsProcessor | None = _option(
        TOKEN_RULES,
        "A callable (ids so far, float32 logits (vocabulary,)) → logits of that shape. Beam search passes "
        "log-probabilities. The arrays are copies.",
        kinds.LOGITS_PROCESSOR,
        hash=False,  # a callable may have no hash
        not_in_json=("a function", "set logit_bias or a constraint"),
    )
    shortlist: bool | None = _option(
        TOKEN_RULES,
        "For a file with a shortlist, a table of the target ids that are likely for each source id. True (the "
        "default) computes the logits of these candidates only, which is faster; False computes the logits of all ids. "
        "Ids in `forced_prefix`, `forced_bos_token_id` and `logit_bias` are always candidates. With a constraint or a "
        "`logits_processor` all ids are candidates. Log-probabilities are normalised over the candidates.",
        Kind(checks.boolean, "", operator.not_),
        True,
        flag="--no-shortlist",
        flag_help="Choose among all ids, although the file has a shortlist of candidates.",
    )
    regex: str | None = _option(
        CONSTRAINTS,
        "The whole text matches this regular expression, unless `max_new_tokens` or a stop string ends it earlier.",
        kinds.text("PATTERN"),
        web=_WEB_CONSTRAINT,
    )
    json_schema: str | Mapping[str, Any] | None = _option(
        CONSTRAINTS,
        "The text is JSON of this JSON schema.",
        kinds.text_or_file("JSON", checks.json_schema),
        web=_WEB_CONSTRAINT,
    )
    grammar: str | None = _option(
        CONSTRAINTS,
        "The text belongs to this grammar, in Lark's notation.",
        kinds.text_or_file("LARK"),
        web=_WEB_CONSTRAINT,
    )
    choices: Sequence[str] | None = _option(
        CONSTRAINTS,
        "The text is one of these strings.",
        kinds.CHOICES,
        flag="--choice",
        web=f"{_WEB_CONSTRAINT}, or compare the choices with score()",
    )
    prompt_lookup: bool | None = _option(
        SPECULATION,
        "Guess the next tokens: look up the latest ones in the prompt, the source and the result, and propose what "
        "followed them. The model checks each guess, so that greedy results stay the same and samples keep their "
        "distribution. Not for beam search.",
        kinds.SWITCH,
        False,
        web=_WEB_SPECULATION,
    )
    draft_model: HasEngine | None = _option(
        SPECULATION,
        "Guess the next tokens with a smaller model of the same vocabulary, loaded with one thread.",
        kinds.DRAFT_MODEL,
        web=_WEB_SPECULATION,
        not_in_json=("a model", "set prompt_lookup"),
    )
    num_draft_tokens: int | None = _option(
        SPECULATION,
        "Guess at most this many tokens at once. The number adapts to the share of correct guesses.",
        kinds.whole_number(1),
        10,
        web=_WEB_SPECULATION,
    )
    adapter: str | None = _option(
        ADAPTERS, "Use this adapter of the file, by its name; base is the model without any.", kinds.text("NAME")
    )
    top_logprobs: int | None = _option(
        OUTPUT,
        "Return the N likeliest tokens at each position with their log-probabilities.",
        kinds.whole_number(0),
        0,
        json_only=True,
    )
    cross_attentions: bool | None = _option(
        OUTPUT,
        "Return the cross-attention weights of each result. The file must have been exported with them.",
        Kind(checks.boolean, "OUT.png", bool),
        False,
        flag_help="Draw a heat map of the source positions that each token attends to; - adds the weights to --json.",
    )
    hidden_states: bool | None = _option(
        OUTPUT,
        "Return the hidden states of each result. The file must have been exported with some.",
        kinds.SWITCH,
        False,
        flag_help="Add the hidden states that the file gives to --json.",
        json_only=True,
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
            object.__setattr__(self, name, OPTIONS[name].kind.check(name, value))
        for names in (CONSTRAINT_NAMES, ("prompt_lookup", "draft_model")):
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
