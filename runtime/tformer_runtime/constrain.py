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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tformer_runtime.errors import MissingExtraError, OptionError
from tformer_runtime.sampling import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["regex", "json_schema", "grammar", "choices"]
Bools = npt.NDArray[np.bool_]


class Grammar:
    """A definition, compiled for one vocabulary. Any number of rows and threads may share it."""

    def __init__(self, kind: Kind, vocabulary: _Vocabulary, matcher: LLMatcher, first: Bools) -> None:
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

    def mask(self, scores: Floats) -> None:
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


def _allowed(matcher: LLMatcher, vocabulary: _Vocabulary) -> Bools:
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
    vocabulary = _vocabulary(tokenizer_json, size, ends)
    if kind == "regex":
        body = {"lark_grammar": _terminal(_as_rust(text), vocabulary.joined, vocabulary.spelt)}
    elif kind == "choices":
        choices = json.loads(text)
        for choice in choices:
            vocabulary.check(choice)
        body = {"lark_grammar": _terminal("|".join(map(_literal, choices)), vocabulary.joined)}
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
    """A Lark grammar of one terminal. joined, spelt: see _Vocabulary."""
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
    return _any_of(re.findall(f"\\{name}", every))


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


def _literal(text: str) -> str:
    """A regular expression, of Rust and Python alike, that matches a text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)


def _any_of(characters: Iterable[str]) -> str:
    """A regular expression, of Rust and Python alike, that matches any of some characters."""
    points = sorted(map(ord, characters))
    if not points:
        return "[^\\U00000000-\\U0010ffff]"
    gaps = [i for i in range(1, len(points)) if points[i] > points[i - 1] + 1]
    runs = zip([0, *gaps], [*gaps, len(points)], strict=True)
    return "[" + "".join(f"\\U{points[a]:08x}-\\U{points[b - 1]:08x}" for a, b in runs) + "]"


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


# Vocabularies


@dataclass(frozen=True)
class _Vocabulary:
    """What ids decode to.

    first, rest: the bytes that each id adds as the first of a text, and later; none if it is not to be generated.
    silent_first: (size,) ids that add nothing as the first, but do later. only_ends: (size,) end tokens.
    joined: ids are words that decode joins by spaces. In `first` and `rest` a space follows every word.
    spelt: a regular expression of texts that can be spelt to their end from wherever a token may lead in them; None:
        all are, or (joined) there are too many words to tell. If joined, a space follows every word.
    single: characters that can be spelt alone, after any others, or the words of a vocabulary that is joined; None:
        all characters.
    of_first, of_rest: what llguidance needs; the ids from `size` on are the 256 bytes, and then its own end token.
    """

    size: int
    ends: tuple[int, ...]
    first: Sequence[bytes]
    rest: Sequence[bytes]
    silent_first: Bools
    only_ends: Bools
    joined: bool
    spelt: str | None
    single: frozenset[str] | None
    of_first: LLTokenizer
    of_rest: LLTokenizer

    def check(self, choice: str) -> None:
        """OptionError if the choice cannot be spelt."""
        if self.joined and self.single is not None:
            missing = [word for word in choice.split(" ") if word not in self.single] if choice else []
            if missing:
                raise OptionError(f"the choice {choice!r} holds {missing[0]!r}, which is not a word of the vocabulary")
        elif self.spelt is not None and not re.fullmatch(self.spelt, choice):
            self.check_characters(choice, f"the choice {choice!r}")
            raise OptionError(f"the choice {choice!r} cannot be spelt by the model's vocabulary: where its spaces are")

    def check_characters(self, text: str, what: str) -> None:
        """OptionError if a character of the text cannot be spelt."""
        missing = sorted(set(text) - self.single - {" "}) if self.single is not None else []
        if missing:
            raise OptionError(
                f"{what} needs {missing[0]!r}, for which the model's vocabulary has no token that adds it alone"
            )


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer_json: str, size: int, ends: tuple[int, ...]) -> _Vocabulary:
    """OptionError if it is not known for certain what the tokenizer's ids decode to."""
    definition = json.loads(tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    unknown = definition["model"].get("unk_token")
    barred: set[int | None] = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    barred |= {*ends, tokenizer.token_to_id(unknown) if unknown else definition["model"].get("unk_id")}
    names = {i: name for name, i in tokenizer.get_vocab().items() if i < size and i not in barred}
    names = dict(sorted(names.items()))
    chain = _chain(definition["decoder"])
    joined = not chain
    if joined:
        words = {i: tokenizer.decode([i]) for i in names}
        rest = {i: f"{word} ".encode() for i, word in words.items() if word and " " not in word}
        first = rest
    elif chain == ["ByteLevel"]:
        first = rest = {i: _byte_level(name) for i, name in names.items()}
    else:
        first, rest = _probed(tokenizer, names, "ByteFallback" in chain)
    _verify(tokenizer, first, rest, joined)
    spelt: str | None = None
    single: frozenset[str] | None = None
    if joined:
        single = frozenset(form.decode()[:-1] for form in rest.values())
        if len(single) <= _WORDS:
            spelt = f"(?:(?:{'|'.join(map(_literal, sorted(single)))}) )*"
    elif _BYTES - {form[0] for form in rest.values() if len(form) == 1}:
        first, rest, spelt, single = _narrowed(first, rest)
    ends = tuple(end for end in ends if 0 <= end < size)
    silent, only_ends = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    silent[[i for i, form in rest.items() if form and not first[i]]] = True
    only_ends[list(ends)] = True
    firsts, rests = ([forms.get(i, b"") for i in range(size)] for forms in (first, rest))
    of_rest = _for_llguidance(rests)
    of_first = of_rest if firsts == rests else _for_llguidance(firsts)
    return _Vocabulary(size, ends, firsts, rests, silent, only_ends, joined, spelt, single, of_first, of_rest)


_WORDS = 512  # an automaton of so many words, times one of the expression's, is small enough
_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # those that occur in UTF-8
_CHAIN = re.compile(r"(ByteLevel |((Replace|Metaspace|WordPiece) )*(ByteFallback )?(Fuse )?(Strip )?)?")


def _chain(decoder: Mapping[str, Any] | None) -> list[str]:
    """The kinds of decoders that make up one; OptionError if what they do to a token may hang on those after it."""
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    stripped = any(part.get("stop") for part in parts if part["type"] == "Strip")
    if stripped or not _CHAIN.fullmatch("".join(f"{kind} " for kind in kinds)) or (decoder and not parts):
        raise OptionError(
            f"generation with this tokenizer cannot be constrained: what its decoder ({', '.join(kinds) or 'none'}) "
            "makes of a token is not known before the text's end"
        )
    return kinds


def _byte_level(name: str) -> bytes:
    """What the decoder ByteLevel makes of a token."""
    try:
        return bytes(_byte_of()[character] for character in name)
    except KeyError:  # an added token, which is not in the alphabet for bytes
        return name.encode()


@functools.cache
def _byte_of() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _probed(
    tokenizer: Tokenizer, names: Mapping[int, str], bytewise: bool
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """What ids decode to as the first of a text and later, found by decoding them."""
    byte = {i: _BYTE.fullmatch(name) for i, name in names.items()} if bytewise else {}
    raw = {i: bytes([int(found[1], 16)]) for i, found in byte.items() if found}
    ids = [i for i in names if i not in raw or raw[i] < b"\x80"]
    alone = dict(zip(ids, tokenizer.decode_batch([[i] for i in ids]), strict=True))
    before = next((i for i in ids if alone[i].strip()), None)
    if before is None:
        return {}, {}
    after = tokenizer.decode_batch([[before, i] for i in ids])
    skip = len(alone[before])
    return (
        {i: form.encode() for i, form in alone.items()} | {i: form for i, form in raw.items() if i not in alone},
        {i: text[skip:].encode() for i, text in zip(ids, after, strict=True)}
        | {i: form for i, form in raw.items() if i not in alone},
    )


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _verify(tokenizer: Tokenizer, first: Mapping[int, bytes], rest: Mapping[int, bytes], joined: bool) -> None:
    """OptionError if sequences of ids decode to something else than the forms of their ids, one after another."""
    whole = [i for i, form in rest.items() if joined or _is_text(form)]
    # Where a beginning is special, what differs there must be as it is later once it is second.
    other = next((i for i in whole if first[i] != rest[i]), whole[0] if whole else 0)
    sequences = [[i, other] for i in whole] + [whole, whole[::-1]] if whole else []
    for ids, text in zip(sequences, tokenizer.decode_batch(sequences), strict=True):
        expected = b"".join([first[ids[0]], *(rest[i] for i in ids[1:])]).decode()
        if text != (expected[:-1] if joined else expected):
            raise OptionError(
                "generation with this tokenizer cannot be constrained: what it decodes ids to is not what it decodes "
                "each to"
            )


def _is_text(form: bytes) -> bool:
    try:
        form.decode()
    except UnicodeDecodeError:
        return False
    return True


def _narrowed(
    first: Mapping[int, bytes], rest: Mapping[int, bytes]
) -> tuple[dict[int, bytes], dict[int, bytes], str, frozenset[str]]:
    """The forms to use of a vocabulary without every byte, `spelt` and `single`: see _Vocabulary.

    A text can be spelt from anywhere if it consists of characters that are tokens, or that are with a space before
    them. So no token may end within a character, or in a space if that is not a token.
    """
    rest = {i: form for i, form in rest.items() if _is_text(form)}
    single = {text for form in rest.values() if len(text := form.decode()) == 1}
    spaced = {text[1] for form in rest.values() if len(text := form.decode()) == 2 and text[0] == " "}
    unit = _any_of(single)
    if " " not in single:
        rest = {i: form for i, form in rest.items() if not form.endswith(b" ")}
        unit = f"(?:{unit}| {_any_of(spaced)})"
    kept = {i: form for i, form in first.items() if i in rest and not (form.endswith(b" ") and " " not in single)}
    begin = {text for form in kept.values() if len(text := form.decode()) == 1}
    if any(rest[i] and not form for i, form in kept.items()) and begin <= single:
        spelt = f"{unit}*"
    else:  # after a first token that says nothing, what only a first token can say could no longer be said
        kept = {i: form for i, form in kept.items() if form}
        spelt = f"(?:{_any_of(begin)}{unit}*)?"
    return kept, rest, spelt, frozenset(single)


def _for_llguidance(forms: Sequence[bytes]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Tokens:
        def __init__(self) -> None:
            # 0xFF, which UTF-8 has not, is llguidance's own mark of special tokens.
            all_bytes = (bytes([byte]) for byte in range(256))
            self.tokens = [*(b"" if b"\xff" in form else form for form in [*forms, *all_bytes]), b"<end>"]
            self.eos_token_id = len(self.tokens) - 1
            self.bos_token_id = None
            self.special_token_ids = [self.eos_token_id]

        def __call__(self, text: bytes | str) -> list[int]:
            return [len(forms) + byte for byte in (text.encode() if isinstance(text, str) else text)]

    return LLTokenizer(TokenizerWrapper(Tokens()))
