"""Constraints of the generated text: a regular expression, a JSON schema, a Lark grammar, or one of several texts.

llguidance finds the bytes that may follow. This module relates these bytes to the texts that a tokenizer decodes ids
to. Two things need care. The first token of a text may decode to another text than later (without its leading space),
so it has a mask of its own. The matcher of the other tokens is fed bytes: its vocabulary ends with all 256 bytes. And a
vocabulary that lacks some bytes can lead to a text that it cannot finish. So a regular expression is first restricted
to the texts that the vocabulary can spell.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import F32, Bools
from tformer_runtime.base.errors import MissingExtraError, OptionError
from tformer_runtime.base.extras import install_command
from tformer_runtime.decoding.options import Constraint
from tformer_runtime.preprocess.json_schema import check_numbers, literal_strings, schemas_in_grammar, with_white_space
from tformer_runtime.preprocess.vocabulary import Vocabulary, any_of, literal, vocabulary_of

MAX_DEFINITION_BYTES = 1 << 20  # llguidance takes 110 bytes of memory and 0.5 µs for each; it bounds its steps itself
MAX_GRAMMAR_SYMBOLS = 50_000  # of a schema with 5,000 properties, which takes 4 s; the time grows with their square
MAX_REQUIRED_BYTES = 40  # that an error shows
_TOO_DEEP = "the json_schema is nested too deeply"

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammar:
    """A constraint, compiled for one vocabulary. Rows and threads may share it."""

    def __init__(self, kind: Constraint, vocabulary: Vocabulary, matcher: LLMatcher, first: Bools) -> None:
        self._kind, self._vocabulary, self._matcher = kind, vocabulary, matcher
        self._first = first  # (vocabulary,) allowed first tokens, with end tokens

    @classmethod
    def compile(
        cls, kind: Constraint, definition: Any, tokenizer_json: str, vocabulary: int, ends: tuple[int, ...]
    ) -> Grammar:
        """Return the grammar of a definition; the latest grammars are cached.

        kind, definition: "regex": a pattern that re.fullmatch would match, without look-around, back references and
            other syntax that Rust's regex lacks. "json_schema": a schema as JSON text or as a result of json.loads;
            at most one line break and its indentation stand between two tokens, unless its "x-guidance" has a
            "whitespace_pattern" or "whitespace_flexible". "grammar": a text in llguidance's variant of Lark's syntax.
            "choices": strings.
        tokenizer_json: the tokenizer in tokenizers' JSON format.
        vocabulary: the number of ids of the model.
        ends: the end tokens, which are not part of the text.
        A definition may come from a stranger: its size is bounded here, and llguidance bounds the states and steps of
        its lexer and parser.
        Cost: milliseconds, and more for thousands of choices and for the first \\w; microseconds for each id of a new
        tokenizer (docs/design/runtime.md).
        Raise OptionError or MissingExtraError.
        """
        if kind not in ("regex", "json_schema", "grammar", "choices"):
            raise OptionError(f'a constraint is a "regex", "json_schema", "grammar" or "choices", not {kind!r}')
        return _compile_grammar(kind, _as_text(kind, definition), tokenizer_json, vocabulary, tuple(ends))

    def start(self, first_id: int | None = None) -> Guide:
        """Return the guide of a new row. first_id: an id before the text, which does not belong to it."""
        return Guide(self, self._matcher.deep_copy(), fresh=True, first_id=first_id)


class Guide:
    """The state of one row in a grammar. One thread at a time may use it.

    A row that has taken an end token or a forbidden token (which beam search uses as padding) is lost: only end tokens
    may follow.
    """

    __slots__ = ("_allowed", "_first_id", "_fresh", "_grammar", "_matcher")

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher | None,
        fresh: bool,
        allowed: Bools | None = None,
        first_id: int | None = None,
    ) -> None:
        self._grammar, self._matcher, self._fresh, self._first_id = grammar, matcher, fresh, first_id
        self._allowed = allowed  # (vocabulary,) allowed next tokens, computed when needed; read-only

    @property
    def lost(self) -> bool:
        """Whether the row has taken an end token or a forbidden token."""
        return self._matcher is None

    def mask(self, scores: F32) -> None:
        """Set the scores (vocabulary,) of forbidden tokens to −inf. End tokens are allowed if the text is complete.

        Cost: microseconds; most where each step has another state and most ids must be checked, as in "[a-z ]{1,200}"
        (docs/design/runtime.md). Raise OptionError if no token is allowed, or if the grammar has become too large for
        llguidance. If the vocabulary lacks some bytes, a grammar or the patterns of a schema may need a text that it
        cannot spell. So may a regex, if decode joins words by spaces and there are more than 512 words.
        """
        np.copyto(scores, -np.inf, where=~self._allowed_next())

    def accept(self, token: int) -> None:
        """Append a token of the row."""
        allowed, self._allowed = self._allowed, None
        vocabulary = self._grammar._vocabulary
        if self._matcher is None:
            return
        if self._first_id is not None:
            self._matcher = self._matcher if token == self._first_id else None
            self._first_id = None
        elif token in vocabulary.ends or not 0 <= token < vocabulary.size:
            self._matcher = None
        elif self._fresh:
            self._fresh = False
            if not self._grammar._first[token]:
                self._matcher = None
            elif not self._matcher.consume_tokens([vocabulary.size + byte for byte in vocabulary.first_bytes[token]]):
                raise self._stuck_error()
        elif not self._matcher.consume_token(token):
            if allowed is not None and allowed[token]:
                raise self._stuck_error()
            self._matcher = None

    def copy(self) -> Guide:
        """Return an independent guide in the same state."""
        matcher = self._matcher and self._matcher.deep_copy()
        return Guide(self._grammar, matcher, self._fresh, self._allowed, self._first_id)

    @property
    def must_end(self) -> bool:
        """Whether only an end token may follow. It costs as much as `mask`, which is then cheap."""
        return not (self._allowed_next() & ~self._grammar._vocabulary.end_mask).any()

    def _allowed_next(self) -> Bools:
        if self._allowed is None:
            vocabulary = self._grammar._vocabulary
            if self._matcher is None:
                self._allowed = vocabulary.end_mask
            elif self._first_id is not None:
                self._allowed = np.arange(vocabulary.size) == self._first_id
            elif self._fresh:
                self._allowed = self._grammar._first
            else:
                self._allowed = _allowed(self._matcher, vocabulary)
                if self._matcher.is_error() or not (self._matcher.is_accepting() or self._allowed.any()):
                    self._allowed = None
                    raise self._stuck_error()
        return self._allowed

    def _stuck_error(self) -> OptionError:
        matcher = self._matcher
        if matcher is None or matcher.is_error():
            reason = _reason(matcher.get_error()) if matcher else "it is over"
            return OptionError(f"the {self._grammar._kind} cannot be followed any further: {reason}")
        required = _required_text(matcher, self._grammar._vocabulary)
        beginning = repr(required) if required else "what must come next"
        return OptionError(
            f"the {self._grammar._kind} has led to a text that the model's vocabulary cannot spell to its end: "
            f"no token begins {beginning}"
        )


def _required_text(matcher: LLMatcher, vocabulary: Vocabulary) -> str:
    """Return the text that must come next, up to MAX_REQUIRED_BYTES: llguidance's own search may never end."""
    matcher, required = matcher.deep_copy(), bytearray()
    while len(required) < MAX_REQUIRED_BYTES and not matcher.is_accepting():
        choices = np.flatnonzero(_bits(matcher)[vocabulary.size : vocabulary.size + 256])
        if len(choices) != 1 or not matcher.consume_token(vocabulary.size + int(choices[0])):
            break
        required.append(int(choices[0]))
    return required.decode("utf-8", "ignore")


def _bits(matcher: LLMatcher) -> npt.NDArray[np.uint8]:
    """Return for each id that llguidance knows, and then for each byte, 1 if it may come next, and 0 if not."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


def _allowed(matcher: LLMatcher, vocabulary: Vocabulary) -> Bools:
    """Return (vocabulary,) the tokens that a matcher allows next, with end tokens if the text may end."""
    allowed: Bools = _bits(matcher)[: vocabulary.size].view(np.bool_)
    allowed[list(vocabulary.ends)] = matcher.is_accepting()
    return allowed


def _as_text(kind: Constraint, definition: Any) -> str:
    """Return the definition as text. Raise OptionError for a definition of another type."""
    if kind == "choices":
        if isinstance(definition, (str, bytes)) or not isinstance(definition, Iterable):
            raise OptionError(f"choices must be a list of strings, not {definition!r}", option="choices")
        definition = list(definition)
        wrong = [choice for choice in definition if not isinstance(choice, str)]
        if wrong or not definition:
            raise OptionError(
                f"choices must be strings, at least one, not {wrong[0] if wrong else definition!r}", option="choices"
            )
        text = json.dumps(definition, ensure_ascii=False)
    elif kind == "json_schema" and isinstance(definition, (Mapping, bool)):
        try:
            text = json.dumps(definition, ensure_ascii=False)
        except RecursionError as error:
            raise OptionError(_TOO_DEEP) from error
        except (TypeError, ValueError) as error:
            raise OptionError(f"the json_schema is not JSON: {error}") from error
    elif isinstance(definition, str):
        text = definition
    else:
        raise OptionError(f"a {kind} must be given as text, not {definition!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise OptionError(f"the {kind} holds half a character (at {error.start + 1})") from error
    if size > MAX_DEFINITION_BYTES:
        raise OptionError(f"a constraint of {size:,} bytes is too long ({kind}): {MAX_DEFINITION_BYTES:,} are read")
    return text


@functools.lru_cache(maxsize=64)
def _compile_grammar(kind: Constraint, text: str, tokenizer_json: str, size: int, ends: tuple[int, ...]) -> Grammar:
    llguidance = _llguidance()
    vocabulary = vocabulary_of(tokenizer_json, size, ends)
    if kind == "regex":
        body = {"lark_grammar": _terminal(_as_rust(text), vocabulary.word_level, vocabulary.spellable_texts)}
    elif kind == "choices":
        choices = json.loads(text)
        for choice in choices:
            vocabulary.check_choice(choice)
        body = {"lark_grammar": _terminal("|".join(map(literal, choices)), vocabulary.word_level)}
    elif vocabulary.word_level:
        raise OptionError(f"a vocabulary of words that are joined by spaces takes a regex or choices, not a {kind}")
    elif kind == "json_schema":
        try:
            schema = with_white_space(json.loads(text))
            check_numbers(schema, kind)
            texts = literal_strings(schema)
        except RecursionError as error:
            raise OptionError(_TOO_DEEP) from error
        except ValueError as error:
            raise OptionError(f"the json_schema is not JSON: {error}") from error
        vocabulary.check_characters(_JSON + "".join(texts), "JSON")
        body = {"json_schema": schema}
    else:
        try:
            for schema in schemas_in_grammar(text):
                check_numbers(schema, kind)
        except RecursionError as error:
            raise OptionError("a schema of the grammar is nested too deeply") from error
        body = {"lark_grammar": text}
    # With forced tokens llguidance would choose the ids. Without them the model chooses among all spellings.
    top = 'start: @body\n%llguidance {"no_forcing": true}'
    grammar = json.dumps({"grammars": [{"name": "top", "lark_grammar": top}, {"name": "body", **body}]})

    def matcher(tokenizer: LLTokenizer) -> LLMatcher:
        limits = llguidance.LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS)
        new_matcher: LLMatcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if new_matcher.is_error():
            name = f"{kind} {text[:80]!r}" if kind == "regex" else kind
            raise OptionError(f"the {name} cannot be used: {_reason(new_matcher.get_error())}")
        return new_matcher

    beginning, start = matcher(vocabulary.first_tokenizer), matcher(vocabulary.later_tokenizer)
    first, later = _allowed(beginning, vocabulary), _allowed(start.deep_copy(), vocabulary)
    if (later & ~vocabulary.end_mask).any():
        first |= vocabulary.silent_first_mask  # a token without text leaves the text at its beginning
    if not first.any() and (beginning.is_error() or not beginning.is_accepting()):
        raise OptionError(f"the {kind} matches nothing that the model's vocabulary can spell")
    return Grammar(kind, vocabulary, start, first)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError(f"llguidance is not installed: {install_command('constrain')}") from error
    return llguidance


def _reason(error: str) -> str:
    """Return the main line of an error message of llguidance, which has several lines and shows the source."""
    inner = re.search(r"^error: (.+)$", error, re.MULTILINE)
    line = next((line for line in error.splitlines() if line.strip()), "llguidance does not say why").strip()
    line = re.sub(r"Enable 'coerce_one_of' option.*", "Use anyOf, or alternatives that exclude each other", line)
    # An open range must begin below 10¹⁸ and end above −10¹⁸. Bounds of other numbers than integers have 63 bits.
    line = re.sub(
        r"Failed to generate regex for (?:float|integer) range: .*",
        "the bounds of its numbers are too large: set a minimum and a maximum, both between −2⁶³ and 2⁶³",
        line,
    )
    place = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", line)
    if inner or "(in regex)" in line:
        return inner[1] if inner else line.split("(in regex): ")[-1]
    return f"line {place[1]}, column {place[2]}: {place[3]}" if place else line[:300]


# Definitions


def _terminal(pattern: str, joined: bool, spelt: str | None = None) -> str:
    """Return a Lark grammar of one terminal. joined, spelt: see `Vocabulary`."""
    from llguidance import regex_to_lark

    def lark(pattern: str) -> str:
        return f"/{regex_to_lark(pattern, '')}/"

    text = lark(f"(?:{pattern})")
    if joined:  # a space follows every word, so that a word that begins another is not taken for it; no word, no space
        text = f"({lark(f'(?:{pattern}) ')} | ({text} & /()/))"
    return f"start: TEXT\nTEXT: {text}" + (f" & {lark(spelt)}" if spelt is not None else "")


@functools.cache
def _class(name: str) -> str:
    """Return Python's \\w, \\d or \\s as a set of characters. Other engines and other editions of Unicode have other
    sets.
    """
    every = "".join(chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000)
    return any_of(re.findall(f"\\{name}", every))


def _part(part: str) -> str:
    """Return a character or an escape of a regular expression in Rust's syntax."""
    if part in (r"\w", r"\d", r"\s"):
        return _class(part[1])
    if part in (r"\W", r"\D", r"\S"):
        return f"[^{_class(part[1].lower())[1:]}"
    return part


def _as_rust(pattern: str) -> str:
    """Return a Python regular expression in the syntax that llguidance reads. Raise OptionError if Python cannot
    compile it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python warns of syntax with another meaning in Rust: set operations
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {error}") from error
        except Warning as warning:
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {warning}: escape it by \\") from warning
    syntax = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "_", pattern, flags=re.DOTALL)
    for feature, unsupported in {"possessive quantifiers": r"[*+?}]\+", "verbose patterns": r"\(\?[a-zA-Z]*x"}.items():
        if re.search(unsupported, syntax):  # they mean something else in Rust
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {feature} are not supported")
    parts = re.findall(r"\\.|[^\\]", pattern, re.DOTALL)
    if parts and parts[0] in ("^", r"\A"):  # the whole text must match anyway
        parts = parts[1:]
    if parts and parts[-1] in ("$", r"\Z"):
        parts = parts[:-1]
    return "".join(map(_part, parts))


_JSON = '{}[]":,-.0123456789truefalsenull'
