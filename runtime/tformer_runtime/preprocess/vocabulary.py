"""What the ids of a tokenizer decode to, as bytes, and which texts they can spell: what a constraint rests on.

Nobody says how a tokenizer decodes. What each id adds is found by decoding, and then proven on sequences of ids; a
tokenizer for which it does not hold is refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from tformer_runtime.base.arrays import Bools
from tformer_runtime.base.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True)
class Vocabulary:
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
def vocabulary_of(tokenizer_json: str, size: int, ends: tuple[int, ...]) -> Vocabulary:
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
            spelt = f"(?:(?:{'|'.join(map(literal, sorted(single)))}) )*"
    elif _BYTES - {form[0] for form in rest.values() if len(form) == 1}:
        first, rest, spelt, single = _narrowed(first, rest)
    ends = tuple(end for end in ends if 0 <= end < size)
    silent, only_ends = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    silent[[i for i, form in rest.items() if form and not first[i]]] = True
    only_ends[list(ends)] = True
    firsts, rests = ([forms.get(i, b"") for i in range(size)] for forms in (first, rest))
    of_rest = _for_llguidance(rests)
    of_first = of_rest if firsts == rests else _for_llguidance(firsts)
    return Vocabulary(size, ends, firsts, rests, silent, only_ends, joined, spelt, single, of_first, of_rest)


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
    """The forms to use of a vocabulary without every byte, `spelt` and `single`: see Vocabulary.

    A text can be spelt from anywhere if it consists of characters that are tokens, or that are with a space before
    them. So no token may end within a character, or in a space if that is not a token.
    """
    rest = {i: form for i, form in rest.items() if _is_text(form)}
    single = {text for form in rest.values() if len(text := form.decode()) == 1}
    spaced = {text[1] for form in rest.values() if len(text := form.decode()) == 2 and text[0] == " "}
    unit = any_of(single)
    if " " not in single:
        rest = {i: form for i, form in rest.items() if not form.endswith(b" ")}
        unit = f"(?:{unit}| {any_of(spaced)})"
    kept = {i: form for i, form in first.items() if i in rest and not (form.endswith(b" ") and " " not in single)}
    begin = {text for form in kept.values() if len(text := form.decode()) == 1}
    if any(rest[i] and not form for i, form in kept.items()) and begin <= single:
        spelt = f"{unit}*"
    else:  # after a first token that says nothing, what only a first token can say could no longer be said
        kept = {i: form for i, form in kept.items() if form}
        spelt = f"(?:{any_of(begin)}{unit}*)?"
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


def literal(text: str) -> str:
    """A regular expression, of Rust and Python alike, that matches a text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)


def any_of(characters: Iterable[str]) -> str:
    """A regular expression, of Rust and Python alike, that matches any of some characters."""
    points = sorted(map(ord, characters))
    if not points:
        return "[^\\U00000000-\\U0010ffff]"
    gaps = [i for i in range(1, len(points)) if points[i] > points[i - 1] + 1]
    runs = zip([0, *gaps], [*gaps, len(points)], strict=True)
    return "[" + "".join(f"\\U{points[a]:08x}-\\U{points[b - 1]:08x}" for a, b in runs) + "]"
