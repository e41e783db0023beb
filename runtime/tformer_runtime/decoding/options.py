"""What a caller may ask of generation: `GenerationOptions`, checked here and nowhere else.

Every option is None until it is set. What the caller leaves open is taken from the file's own defaults, and what the
file leaves open from the table in `Settings`. Which of the three ways of decoding is meant follows from the options:

- sampling, if temperature, top_k, top_p or min_p is set and temperature is not 0;
- else beam search, if num_beams is more than 1;
- else greedy.

A caller who sets a sampling option overrules a beam size of the file, and the other way round; both set by one side
is an error. So it is with the constraints, of which one may be set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import numpy.typing as npt

from tformer_runtime.base.arrays import F32, Ints
from tformer_runtime.base.errors import OptionError
from tformer_runtime.base.validation import refused, whole

if TYPE_CHECKING:
    from tformer_runtime.engine.engine import Engine

EarlyStopping = bool | Literal["never"]
Kind = Literal["regex", "json_schema", "grammar", "choices"]  # of constraints
LogitsProcessor = Callable[[Ints, F32], npt.ArrayLike]


@runtime_checkable
class HasEngine(Protocol):
    """A model that guesses for another, such as a `Model`."""

    @property
    def engine(self) -> Engine: ...


Draft = HasEngine | Literal["prompt"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_GROUPS = ("num_beam_groups", "diversity_penalty")
_DRAFT = ("draft", "num_draft_tokens")
_CONSTRAINTS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate. OptionError if a value is impossible or a name is unknown.

    How long, and where the text begins and ends. A prefix is part of the result and counts as part of the prompt:

    max_new_tokens: at most so many tokens, the end token included; by default as many as the model can hold.
    min_new_tokens: the end token may not come before so many others.
    stop_strings: the text ends before the first of these strings.
    forced_prefix: text or ids which the result begins with, after forced_bos_token_id if that is set.
    forced_bos_token_id: the id that generation begins with, such as the target language of a multilingual translator.

    Beam search:

    num_beams: hypotheses kept at each step; 1 is greedy.
    num_return_sequences: results for one input: the best of num_beams hypotheses, or so many samples.
    length_penalty: a hypothesis scores its summed log-probability / length ** length_penalty.
    early_stopping: beam search ends for an input when enough hypotheses are complete and
        True: at once; False: no better one seems likely; "never": no better one is possible.
    patience: how many are enough: round(num_beams * patience) (Kasai et al. 2022).
    num_beam_groups: so many searches of num_beams / num_beam_groups beams each, one after the other at each step.
    diversity_penalty: taken from a token's log-probability for each beam of the groups before that has just chosen it
        (Hamming diversity, Vijayakumar et al. 2016).

    Sampling:

    temperature: logits are divided by it before drawing; 0 is greedy.
    top_k: draw from the k likeliest tokens only; 0 is no limit.
    top_p: draw from the fewest tokens whose probabilities sum to p or more.
    min_p: draw from the tokens that are at least p times as likely as the likeliest.
    seed: the same seed draws the same tokens for the input of the same index, whatever is beside it in the batch.

    What may come, and what is to come less or more often (see logit_rules.py for their order):

    suppress_tokens: ids that never come.
    begin_suppress_tokens: ids that do not come first, or not second where forced_bos_token_id is set.
    bad_words_ids: sequences of ids that never come. A lone end token is passed over: suppress takes it.
    logit_bias: id → number added to its logit.
    repetition_penalty: logits of all ids so far, the prompt's too, are divided by it if above 0, else multiplied.
    presence_penalty: taken from the logit of each id that has been generated.
    frequency_penalty: taken from the logit of an id as many times as it has been generated.
    no_repeat_ngram_size: no sequence of so many ids comes twice, the prompt's counted; 0 is no limit.
    logits_processor: a callable (ids so far, float32 logits (vocabulary,)) → logits of that shape. In beam search it
        gets log-probabilities. It gets copies. Not for a file's defaults.

    Constraints, of which one may be set. The text of the result, unless max_new_tokens or a stop string ends it before,

    regex: matches this regular expression as a whole;
    json_schema: is JSON of this schema, given as JSON or as a dict;
    grammar: belongs to this grammar, written as Lark's are;
    choices: is one of these.

    Speculation, which makes greedy decoding and sampling of one row faster and changes nothing else (speculation.py):

    draft: where guesses come from, several of which a step of the model reads at once. "prompt": from what the prompt,
        the source if it has the same tokenizer, and the result so far hold, where it goes on from the latest ids. Or a
        smaller `Model` of the same vocabulary, which reads every prompt as a whole. Load it with threads=1: threads of
        its own would wait for those of the model, which spin between steps (with them, guesses that make a request 1.6
        times as fast made it slower, 0.86 and 0.61 times, on two cores). Each token is chosen from the model's own
        logits. So greedy tokens are those without a draft, and so are samples by a seed if the guesses are copied; but
        a step over several tokens may round otherwise than steps over one, in float32's last digits, which of a
        quantised file decide now and then to which integer an activation is rounded, and what rounding alone decides
        may be decided otherwise. A file with kernels for few tokens, optimised for latency or balanced, would round all
        of a longer step otherwise: there a step holds no more tokens than those serve, one guess with 8 bits and two
        with 4, unless it was tuned. Guesses that a draft model has drawn make samples other ones of the same
        distribution, the same in every call. Rows that are decoded side by side (a batch_size of more than 1,
        num_return_sequences, an AsyncModel) go without guesses, except where a draft model draws: those are decoded row
        by row.
    num_draft_tokens: guesses at once, at most. As many are made as pay, by how many came true; none where none do.

    What is computed:

    shortlist: of a file with a shortlist, whether only the candidates of the source may come (the default), which is
        faster, or all ids. Ids that forced_prefix, forced_bos_token_id and logit_bias name are candidates; with a
        constraint or a logits_processor all ids are. Log-probabilities are among candidates. Of another file it may be
        False only.

    What is given beside the text:

    top_logprobs: so many of the likeliest tokens at each position, and their log-probabilities.
    alignments: each result's alignments; the file must have been exported with them.
    hidden: each result's hidden states; the file must have been exported with some.

    Lists become tuples, logit_bias a tuple of pairs in the order of ids and json_schema JSON, so that options compare.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop_strings: str | Sequence[str] | None = None
    forced_prefix: str | Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    patience: float | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logits_processor: LogitsProcessor | None = field(default=None, hash=False)
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    draft: Draft | None = None
    num_draft_tokens: int | None = None
    shortlist: bool | None = None
    top_logprobs: int | None = None
    alignments: bool | None = None
    hidden: bool | None = None

    if not TYPE_CHECKING:  # type checkers know the names already

        def __new__(cls, *_: Any, **options: Any) -> GenerationOptions:
            names = [f.name for f in fields(cls)]
            for name in options:
                if name not in names:
                    import difflib  # which only a wrong name waits for

                    close = difflib.get_close_matches(name, names, 1)
                    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
                    raise OptionError(f"there is no option {name!r}: {hint}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            object.__setattr__(self, name, _CHECKS[name](name, value))
        constraints = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise OptionError(f"{' and '.join(constraints)} cannot be had at once: set one")

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def with_(self, overrides: Mapping[str, Any]) -> GenerationOptions:
        """These options with others set on top."""
        return GenerationOptions(**{**self.given(), **overrides}) if overrides else self


@dataclass(frozen=True)
class Settings:
    """Options with nothing left open: the caller's over the file's over the values below.

    Settings that are equal ask for the same, so that requests with them may be decoded together.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    forced_prefix: str | tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    patience: float = 1.0
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logits_processor: LogitsProcessor | None = field(default=None, hash=False)  # a callable may have no hash
    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None
    choices: tuple[str, ...] | None = None
    draft: Draft | None = None
    num_draft_tokens: int = 10
    shortlist: bool = True
    top_logprobs: int = 0
    alignments: bool = False
    hidden: bool = False

    @property
    def sampling(self) -> bool:
        return self.temperature != 0 and any(getattr(self, name) is not None for name in _SAMPLING)

    @property
    def beams(self) -> bool:
        """Whether it is beam search."""
        return self.num_beams > 1 and not self.sampling

    @property
    def width(self) -> int:
        """The rows that a request takes."""
        return max(self.num_beams, self.num_return_sequences)

    @property
    def constraint(self) -> tuple[Kind, Any] | None:
        """Which is set, and its definition."""
        return next(((kind, text) for kind in _CONSTRAINTS if (text := getattr(self, kind)) is not None), None)

    @property
    def enough(self) -> int:
        """How many complete hypotheses end a beam search."""
        return math.floor(self.num_beams * self.patience + 0.5)

    @classmethod
    def of(cls, options: GenerationOptions, defaults: Mapping[str, Any]) -> Settings:
        """OptionError if the options contradict each other or the file's defaults are none that exist."""
        mine = options.given()
        files = file_defaults(defaults)
        if mine.get("temperature") != 0 and any(name in mine for name in _SAMPLING):
            files = _without(files, ("num_beams", "num_return_sequences", "patience", *_GROUPS))
        elif mine.get("num_beams", 1) > 1:
            files = _without(files, (*_SAMPLING, *_DRAFT))
        elif "num_beams" in mine:
            files = _without(files, ("patience", *_GROUPS))
        if any(name in mine for name in _CONSTRAINTS):
            files = _without(files, _CONSTRAINTS)
        settings = cls(**{**files, **mine})
        if settings.draft is None and "num_draft_tokens" in mine:
            raise OptionError(f"num_draft_tokens={settings.num_draft_tokens} needs a draft")
        settings._check()
        return settings

    def _check(self) -> None:
        if self.sampling and self.num_beams > 1:
            raise OptionError(f"num_beams={self.num_beams} and sampling ({', '.join(_SAMPLING)}) cannot be had at once")
        if not self.sampling and self.num_return_sequences > self.num_beams:
            raise OptionError(
                f"num_return_sequences={self.num_return_sequences} needs a num_beams of at least "
                f"{self.num_return_sequences}, or sampling"
            )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.num_beams % self.num_beam_groups:
            raise OptionError(
                f"num_beam_groups={self.num_beam_groups} must divide num_beams, which is {self.num_beams}"
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise OptionError(f"diversity_penalty={self.diversity_penalty} needs a num_beam_groups of at least 2")
        if self.num_beams > 1 and self.enough < self.num_return_sequences:
            raise OptionError(
                f"patience={self.patience} ends at {self.enough} hypotheses, fewer than "
                f"num_return_sequences={self.num_return_sequences}"
            )
        if self.draft is not None and self.beams:
            raise OptionError(
                f"a draft guesses for one row and num_beams={self.num_beams} has more: set 1, or no draft"
            )
        if self.forced_bos_token_id in self.suppress_tokens:
            raise OptionError(
                f"forced_bos_token_id={self.forced_bos_token_id} is one of the ids that suppress_tokens forbids"
            )


def file_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A model file's generation defaults as options that are set, from JSON's lists and objects or from Python's.

    OptionError if they are none that exist, or if one is a callable, which no file can hold.
    """
    try:
        given = GenerationOptions(**defaults).given()
        if "logits_processor" in given:
            raise OptionError("logits_processor is a callable, which a file cannot hold")
    except OptionError as error:
        raise OptionError(f"the model file's generation defaults: {error}") from error
    return given


def _without(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


# A check takes an option's name and its value and gives the value as it is kept.
_Check = Callable[[str, Any], Any]


def _whole(least: int) -> _Check:
    return lambda name, value: whole(name, value, least)


def _number(what: str, holds: Callable[[float], bool] = lambda _: True) -> _Check:
    def check(name: str, value: Any) -> float:
        if not (_finite(value) and holds(value)):
            raise refused(name, what, value)
        return float(value)

    return check


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(name, "True or False", value)
    return value


def _early(name: str, value: Any) -> EarlyStopping:
    if isinstance(value, bool):
        return value
    if value != "never":
        raise refused(name, 'True, False or "never"', value)
    return "never"


def _text(name: str, value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise refused(name, "a string that is not empty", value)
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise refused(name, "strings that are not empty", value)
    return items


def _stop(name: str, value: Any) -> tuple[str, ...]:
    return _strings(name, (value,) if isinstance(value, str) else value)


def _choices(name: str, value: Any) -> tuple[str, ...]:
    choices = _strings(name, value)
    if not choices:
        raise OptionError(f"{name} must be one string or more, not none")
    return choices


def _items(value: Any) -> tuple[Any, ...] | None:
    """What a list, a tuple, a set or an array holds; None for all else."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # an array of no axes
        return None


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _id(name: str, value: Any) -> int:
    if not _is_id(value):
        raise refused(name, "a token id, a whole number of at least 0", value)
    return int(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(value)
    if items is None or not all(map(_is_id, items)):
        raise refused(name, "a sequence of token ids", value)
    return tuple(map(int, items))


def _prefix(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value or ()
    if _items(value) is None:
        raise refused(name, "text or a sequence of token ids", value)
    return _ids(name, value)


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    sequences = [_items(item) for item in _items(value) or ()]
    if _items(value) is None or not all(items and all(map(_is_id, items)) for items in sequences):
        raise refused(name, "a sequence of sequences of token ids, none of them empty", value)
    return tuple(tuple(map(int, items or ())) for items in sequences)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """From a mapping, whose ids are strings if it was JSON, or from pairs."""
    items = _items(value.items() if isinstance(value, Mapping) else value)
    pairs = [_pair(item) for item in items or ()]
    bias = dict(pair for pair in pairs if pair)
    if items is None or len(bias) != len(pairs):
        raise refused(name, "a mapping from token ids to numbers, each id once", value)
    return tuple(sorted(bias.items()))


def _pair(value: Any) -> tuple[int, float] | None:
    """An id and a number; None if it is something else."""
    key, number = items if len(items := _items(value) or ()) == 2 else (None, None)
    if isinstance(key, str) and key.isdecimal():
        key = int(key)
    return (int(key), float(number)) if _is_id(key) and _finite(number) else None


def _schema(name: str, value: Any) -> str:
    """As JSON; the order of its properties is kept, since it is the order in which they are written."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        schema = None
    if not isinstance(schema, Mapping):
        raise refused(name, "a JSON schema, as JSON or as a dict", value)
    return text


def _callable(name: str, value: Any) -> LogitsProcessor:
    if not callable(value):
        raise refused(name, "a callable", value)
    processor: LogitsProcessor = value
    return processor


def _draft(name: str, value: Any) -> Draft:
    if isinstance(value, HasEngine) or value == "prompt":
        draft: Draft = value
        return draft
    raise refused(name, 'a Model or "prompt"', value)


_CHECKS: dict[str, _Check] = {
    "max_new_tokens": _whole(1),
    "min_new_tokens": _whole(0),
    "stop_strings": _stop,
    "forced_prefix": _prefix,
    "forced_bos_token_id": _id,
    "num_beams": _whole(1),
    "num_return_sequences": _whole(1),
    "length_penalty": _number("a number"),
    "early_stopping": _early,
    "patience": _number("more than 0", lambda x: x > 0),
    "num_beam_groups": _whole(1),
    "diversity_penalty": _number("0 or more", lambda x: x >= 0),
    "temperature": _number("0 or more", lambda x: x >= 0),
    "top_k": _whole(0),
    "top_p": _number("more than 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": _number("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "seed": _whole(0),
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "bad_words_ids": _sequences,
    "logit_bias": _bias,
    "repetition_penalty": _number("more than 0", lambda x: x > 0),
    "presence_penalty": _number("a number"),
    "frequency_penalty": _number("a number"),
    "no_repeat_ngram_size": _whole(0),
    "logits_processor": _callable,
    "regex": _text,
    "json_schema": _schema,
    "grammar": _text,
    "choices": _choices,
    "draft": _draft,
    "num_draft_tokens": _whole(1),
    "shortlist": _flag,
    "top_logprobs": _whole(0),
    "alignments": _flag,
    "hidden": _flag,
}
