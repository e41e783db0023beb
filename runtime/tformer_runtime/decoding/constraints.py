"""What a text may be: a regular expression, a JSON schema, a Lark grammar, or one of some answers.

llguidance tells which bytes may follow which; what is here ties these bytes to what a tokenizer decodes ids to. Two
things need care. The first token of a text may decode to something else than it does later (its leading space is
left out), so its mask is one of its own, and the others' matcher is fed bytes: its vocabulary ends in all 256 of them.
And a vocabulary that lacks some bytes can lead into a text that it cannot finish, so a regular expression is narrowed
beforehand to what the vocabulary can spell whatever it began with.
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

from tformer_runtime.base.arrays import F32, Bools
from tformer_runtime.base.errors import MissingExtraError, OptionError
from tformer_runtime.decoding.options import Kind
from tformer_runtime.preprocess.vocabulary import Vocabulary, any_of, literal, vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammar:
    """A definition, compiled for one vocabulary. Any number of rows and threads may share it."""

    def __init__(self, kind: Kind, vocabulary: Vocabulary, matcher: LLMatcher, first: Bools) -> None:
        self._kind, self._vocabulary, self._matcher = kind, vocabulary, matcher
        self._first = first  # (vocabulary,) what may come first, end tokens included

    @classmethod
    def compile(
        cls, kind: Kind, definition: Any, tokenizer_json: str, vocabulary: int, ends: tuple[int, ...]
    ) -> Grammar:
        """The grammar of a definition; the last ones that were asked for are kept.

        kind, definition: "regex": what Python's re.fullmatch is to match, less look-around, back references and what
            Rust's regex syntax lacks. "json_schema": a schema, as JSON text or as what json.loads gives; there may be
            any white space, unless its "x-guidance" is {"whitespace_flexible": false}. "grammar": a text in
            llguidance's variant of Lark's syntax. "choices": strings.
        tokenizer_json: the tokenizer in tokenizers' JSON format. vocabulary: how many ids the model has. ends: ids
            that end a text, and are no part of it.
        3–10 ms, for thousands of choices 50, 200 for the first \\w; and 10 µs for each id of a new tokenizer.
        Raises OptionError, MissingExtraError.
        """
        if kind not in ("regex", "json_schema", "grammar", "choices"):
            raise OptionError(f'a constraint is a "regex", "json_schema", "grammar" or "choices", not {kind!r}')
        return _compiled(kind, _as_text(kind, definition), tokenizer_json, vocabulary, tuple(ends))

    def start(self, before: int | None = None) -> Guide:
        """The guide of a row that has generated nothing yet. 10 µs. before: an id that comes first and is no part of
        the text."""
        return Guide(self, self._matcher.deep_copy(), fresh=True, before=before)


class Guide:
    """Where one row stands in a grammar. To be used by one thread at a time.

    A row that has taken an end token, or one that was not allowed (of which a beam search makes padding), is lost:
    only end tokens follow.
    """

    __slots__ = ("_allowed", "_before", "_fresh", "_grammar", "_matcher")

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher | None,
        fresh: bool,
        allowed: Bools | None = None,
        before: int | None = None,
    ) -> None:
        self._grammar, self._matcher, self._fresh, self._before = grammar, matcher, fresh, before
        self._allowed = allowed  # (vocabulary,) what may come next, once it has been asked for; never written to

    @property
    def lost(self) -> bool:
        """Whether the row has taken an end token, or one that was not allowed."""
        return self._matcher is None

    def mask(self, scores: F32) -> None:
        """Set what may not come next to −inf in scores, (vocabulary,). End tokens may where the text is complete.

        15–40 µs for 32,000 ids, of which 5–15 are the writing; 100 µs between the rules of a grammar, and 500 where
        every step is another state and most ids are to be looked at, as in "[a-z ]{1,200}".

        OptionError if nothing may come next: of a vocabulary without every byte, a grammar, or a schema's patterns, may
        demand what it cannot spell (and a regex, of one of more than 512 words that decode joins by spaces). Or if the
        grammar has become too large for llguidance.
        """
        np.copyto(scores, -np.inf, where=~self._next())

    def accept(self, token: int) -> None:
        """The row has taken this token. A few µs."""
        allowed, self._allowed = self._allowed, None
        vocabulary = self._grammar._vocabulary
        if self._matcher is None:
            return
        if self._before is not None:
            self._matcher = self._matcher if token == self._before else None
            self._before = None
        elif token in vocabulary.ends or not 0 <= token < vocabulary.size:
            self._matcher = None
        elif self._fresh:
            self._fresh = False
            if not self._grammar._first[token]:
                self._matcher = None
            elif not self._matcher.consume_tokens([vocabulary.size + byte for byte in vocabulary.first[token]]):
                raise self._stuck()
        elif not self._matcher.consume_token(token):
            if allowed is not None and allowed[token]:
                raise self._stuck()
            self._matcher = None

    def copy(self) -> Guide:
        """A guide at the same place that goes its own way. 5 µs."""
        matcher = self._matcher and self._matcher.deep_copy()
        return Guide(self._grammar, matcher, self._fresh, self._allowed, self._before)

    @property
    def over(self) -> bool:
        """Whether nothing but an end token may follow. Costs as much as mask, which is then for the writing only."""
        return not (self._next() & ~self._grammar._vocabulary.only_ends).any()

    def _next(self) -> Bools:
        if self._allowed is None:
            vocabulary = self._grammar._vocabulary
            if self._matcher is None:
                self._allowed = vocabulary.only_ends
            elif self._before is not None:
                self._allowed = np.arange(vocabulary.size) == self._before
            elif self._fresh:
                self._allowed = self._grammar._first
            else:
                self._allowed = _allowed(self._matcher, vocabulary)
                if self._matcher.is_error() or not (self._matcher.is_accepting() or self._allowed.any()):
                    self._allowed = None
                    raise self._stuck()
        return self._allowed

    def _stuck(self) -> OptionError:
        matcher = self._matcher
        if matcher is None or matcher.is_error():
            reason = _reason(matcher.get_error()) if matcher else "it is over"
            return OptionError(f"the {self._grammar._kind} cannot be followed any further: {reason}")
        wanted = matcher.compute_ff_bytes().decode("utf-8", "ignore")
        what = repr(wanted) if wanted else "what must come next"
        return OptionError(
            f"the {self._grammar._kind} has led to a text that the model's vocabulary cannot spell to its end: "
            f"no token begins {what}"
        )


def _allowed(matcher: LLMatcher, vocabulary: Vocabulary) -> Bools:
    """(vocabulary,) what a matcher allows next, and end tokens if it may end here."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed: Bools = np.unpackbits(bits, count=vocabulary.size, bitorder="little").view(np.bool_)
    allowed[list(vocabulary.ends)] = matcher.is_accepting()
    return allowed


def _as_text(kind: Kind, definition: Any) -> str:
    """The definition as text that stands for it; OptionError if it is not what its kind takes."""
    if kind == "choices":
        if isinstance(definition, (str, bytes)) or not isinstance(definition, Iterable):
            raise OptionError(f"choices must be a list of strings, not {definition!r}")
        definition = list(definition)
        wrong = [choice for choice in definition if not isinstance(choice, str)]
        if wrong or not definition:
            raise OptionError(f"choices must be strings, at least one, not {wrong[0] if wrong else definition!r}")
        text = json.dumps(definition, ensure_ascii=False)
    elif kind == "json_schema" and isinstance(definition, (Mapping, bool)):
        try:
            text = json.dumps(definition, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise OptionError(f"the json_schema is not JSON: {error}") from error
    elif isinstance(definition, str):
        text = definition
    else:
        raise OptionError(f"a {kind} must be given as text, not {definition!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the {kind} holds half a character (at {error.start + 1})") from error
    return text


@functools.lru_cache(maxsize=64)
def _compiled(kind: Kind, text: str, tokenizer_json: str, size: int, ends: tuple[int, ...]) -> Grammar:
    llguidance = _llguidance()
    vocabulary = vocabulary_of(tokenizer_json, size, ends)
    if kind == "regex":
        body = {"lark_grammar": _terminal(_as_rust(text), vocabulary.joined, vocabulary.spelt)}
    elif kind == "choices":
        choices = json.loads(text)
        for choice in choices:
            vocabulary.check(choice)
        body = {"lark_grammar": _terminal("|".join(map(literal, choices)), vocabulary.joined)}
    elif vocabulary.joined:
        raise OptionError(f"a vocabulary of words that are joined by spaces takes a regex or choices, not a {kind}")
    elif kind == "json_schema":
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise OptionError(f"the json_schema is not JSON: {error}") from error
        vocabulary.check_characters(_JSON + "".join(_strings(schema)), "JSON")
        body = {"json_schema": schema}
    else:
        body = {"lark_grammar": text}
    # Forced tokens would be llguidance's own choice of ids: every spelling is allowed, so that the model chooses.
    top = 'start: @body\n%llguidance {"no_forcing": true}'
    grammar = json.dumps({"grammars": [{"name": "top", "lark_grammar": top}, {"name": "body", **body}]})

    def matcher(tokenizer: LLTokenizer) -> LLMatcher:
        found: LLMatcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if found.is_error():
            shown = f"{kind} {text[:80]!r}" if kind == "regex" else kind
            raise OptionError(f"the {shown} cannot be used: {_reason(found.get_error())}")
        return found

    beginning, start = matcher(vocabulary.of_first), matcher(vocabulary.of_rest)
    first, later = _allowed(beginning, vocabulary), _allowed(start.deep_copy(), vocabulary)
    if (later & ~vocabulary.only_ends).any():
        first |= vocabulary.silent_first  # nothing is said yet, so what may follow is what a text may begin with
    if not first.any() and (beginning.is_error() or not beginning.is_accepting()):
        raise OptionError(f"the {kind} matches nothing that the model's vocabulary can spell")
    return Grammar(kind, vocabulary, start, first)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance is not installed; pip install tformer[constrain]") from error
    return llguidance


def _reason(error: str) -> str:
    """The gist of llguidance's message, which has several lines and shows the source."""
    inner = re.search(r"^error: (.+)$", error, re.MULTILINE)
    line = next((line for line in error.splitlines() if line.strip()), "llguidance does not say why").strip()
    place = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", line)
    if inner or "(in regex)" in line:
        return inner[1] if inner else line.split("(in regex): ")[-1]
    return f"line {place[1]}, column {place[2]}: {place[3]}" if place else line[:300]


# Definitions


def _terminal(pattern: str, joined: bool, spelt: str | None = None) -> str:
    """A Lark grammar of one terminal. joined, spelt: see Vocabulary."""
    from llguidance import regex_to_lark

    def lark(pattern: str) -> str:
        return f"/{regex_to_lark(pattern, '')}/"

    text = lark(f"(?:{pattern})")
    if joined:  # a space follows every word, so that a word that begins another is not taken for it; no word, no space
        text = f"({lark(f'(?:{pattern}) ')} | ({text} & /()/))"
    return f"start: TEXT\nTEXT: {text}" + (f" & {lark(spelt)}" if spelt is not None else "")


@functools.cache
def _class(name: str) -> str:
    """Python's \\w, \\d or \\s as a set of characters: other engines, and other editions of Unicode, have others."""
    every = "".join(chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000)
    return any_of(re.findall(f"\\{name}", every))


def _part(part: str) -> str:
    """A character of a regular expression, or an escaped one, as Rust is to read it."""
    if part in (r"\w", r"\d", r"\s"):
        return _class(part[1])
    if part in (r"\W", r"\D", r"\S"):
        return f"[^{_class(part[1].lower())[1:]}"
    return part


def _as_rust(pattern: str) -> str:
    """A regular expression of Python in the syntax that llguidance reads; OptionError if Python does not read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what has another meaning elsewhere: set operations
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {error}") from error
        except Warning as warning:
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {warning}: escape it by \\") from warning
    syntax = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "_", pattern, flags=re.DOTALL)
    for what, found in {"possessive quantifiers": r"[*+?}]\+", "verbose patterns": r"\(\?[a-zA-Z]*x"}.items():
        if re.search(found, syntax):  # Rust reads them otherwise
            raise OptionError(f"the regex {pattern[:80]!r} cannot be used: {what} are not supported")
    parts = re.findall(r"\\.|[^\\]", pattern, re.DOTALL)
    if parts and parts[0] in ("^", r"\A"):  # the whole text is meant in any case
        parts = parts[1:]
    if parts and parts[-1] in ("$", r"\Z"):
        parts = parts[:-1]
    return "".join(map(_part, parts))


_JSON = '{}[]":,-.0123456789truefalsenull'


def _strings(schema: Any) -> list[str]:
    """The strings that a schema may demand word for word."""
    if isinstance(schema, list):
        return [text for part in schema for text in _strings(part)]
    if not isinstance(schema, dict):
        return []
    found = []
    for key, value in schema.items():
        if key in ("enum", "const", "required"):
            found.append(json.dumps(value, ensure_ascii=False))
        elif key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
            found += value if key == "properties" else []
            found += [text for part in value.values() for text in _strings(part)]
        else:
            found += _strings(value)
    return found
