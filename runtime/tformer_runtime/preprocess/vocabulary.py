"""The bytes of each id of a tokenizer, and the texts that ids can spell, for constrained generation.

The bytes are measured by decoding ids, and verified on sequences of ids. A tokenizer is refused if the text of a
sequence is not the concatenation of these bytes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Bools
from tformer_runtime.base.errors import OptionError, error_summary, quotable
from tformer_runtime.base.foreign_errors import foreign_errors

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer


class Vocabulary(Struct, frozen=True):
    """The bytes of each id.

    size: the number of ids.
    ends: the end tokens.
    first_bytes: the bytes that each id adds at the beginning of a text; empty for an id that must not be generated.
    silent_first_mask: (size,) ids that add no bytes at the beginning, but do later.
    end_mask: (size,) end tokens.
    word_level: whether ids are words that decoding joins by spaces. In `first_bytes` a space then follows every word.
    spellable_texts: a regular expression of texts that can be completed after every token that begins them. None if
        all texts can, or if a word-level vocabulary is too large for one. For a word-level vocabulary a space follows
        every word.
    spellable_alone: characters that can follow any text, or the words of a word-level vocabulary; None for all
        characters.
    first_tokenizer, later_tokenizer: the tokenizers of llguidance. Ids from `size` on are the 256 bytes, and then the
        end token of llguidance.
    """

    size: int
    ends: tuple[int, ...]
    first_bytes: Sequence[bytes]
    silent_first_mask: Bools
    end_mask: Bools
    word_level: bool
    spellable_texts: str | None
    spellable_alone: frozenset[str] | None
    first_tokenizer: LLTokenizer
    later_tokenizer: LLTokenizer

    def check_choice(self, choice: str) -> None:
        """Raise OptionError for a choice that cannot be spelt."""
        quoted = repr(quotable(choice))
        if self.word_level and self.spellable_alone is not None:
            missing = [word for word in choice.split(" ") if word not in self.spellable_alone] if choice else []
            if missing:
                word = repr(quotable(missing[0]))
                raise OptionError(f"the choice {quoted} holds {word}, which is not a word of the vocabulary")
        elif self.spellable_texts is not None and not re.fullmatch(self.spellable_texts, choice):
            self.check_characters(choice, f"the choice {quoted}")
            raise OptionError(f"the choice {quoted} cannot be spelt by the model's vocabulary: where its spaces are")

    def check_characters(self, text: str, subject: str) -> None:
        """Raise OptionError for a text with a character that cannot be spelt. subject: of the sentence of the error."""
        missing = sorted(set(text) - self.spellable_alone - {" "}) if self.spellable_alone is not None else []
        if missing:
            raise OptionError(
                f"{subject} needs {missing[0]!r}, for which the model's vocabulary has no token that adds it alone"
            )


@functools.lru_cache(maxsize=8)
def vocabulary_of(tokenizer_json: str, size: int, ends: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    tokenizer_json: its definition.
    size: the number of ids of the model.
    ends: the end tokens.
    Raise OptionError for a tokenizer whose ids have no certain bytes.
    """
    with foreign_errors(_unreadable):
        return _vocabulary_of(tokenizer_json, size, ends)


def _unreadable(error: BaseException) -> OptionError:
    return OptionError(f"generation with this tokenizer cannot be constrained: {error_summary(error)}")


def _vocabulary_of(tokenizer_json: str, size: int, ends: tuple[int, ...]) -> Vocabulary:
    from tokenizers import Tokenizer  # as late as in `tokenizer.Codec`

    definition = json.loads(tokenizer_json)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    unknown = definition["model"].get("unk_token")
    excluded: set[int | None] = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    excluded |= {*ends, tokenizer.token_to_id(unknown) if unknown else definition["model"].get("unk_id")}
    names = {i: name for name, i in tokenizer.get_vocab().items() if i < size and i not in excluded}
    names = dict(sorted(names.items()))
    decoder_types = _decoder_types(definition["decoder"])
    word_level = not decoder_types
    if word_level:
        words = {i: tokenizer.decode([i]) for i in names}
        first = later = {i: f"{word} ".encode() for i, word in words.items() if word and " " not in word}
    elif decoder_types == ["ByteLevel"]:
        first = later = {i: _byte_level(name) for i, name in names.items()}
    else:
        first, later = _measure_bytes(tokenizer, names, "ByteFallback" in decoder_types)
    _verify(tokenizer, first, later, word_level)
    texts: str | None = None
    alone: frozenset[str] | None = None
    if word_level:
        alone = frozenset(form.decode()[:-1] for form in later.values())
        if len(alone) <= _MAX_PATTERN_WORDS:
            texts = f"(?:(?:{'|'.join(map(literal, sorted(alone)))}) )*"
    elif _UTF8_BYTES - {form[0] for form in later.values() if len(form) == 1}:
        first, later, texts, alone = _restrict(first, later)
    ends = tuple(end for end in ends if 0 <= end < size)
    silent_first, end_mask = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    silent_first[[i for i, form in later.items() if form and first.get(i) == b""]] = True
    end_mask[list(ends)] = True
    first_bytes, later_bytes = ([forms.get(i, b"") for i in range(size)] for forms in (first, later))
    later_tokenizer = _llguidance_tokenizer(later_bytes)
    first_tokenizer = later_tokenizer if first_bytes == later_bytes else _llguidance_tokenizer(first_bytes)
    return Vocabulary(
        size=size,
        ends=ends,
        first_bytes=first_bytes,
        silent_first_mask=silent_first,
        end_mask=end_mask,
        word_level=word_level,
        spellable_texts=texts,
        spellable_alone=alone,
        first_tokenizer=first_tokenizer,
        later_tokenizer=later_tokenizer,
    )


_MAX_PATTERN_WORDS = 512  # the automaton of more words, times that of the constraint, would be large
_UTF8_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # bytes that occur in UTF-8
_SUPPORTED_DECODERS = re.compile(r"(ByteLevel |((Replace|Metaspace|WordPiece) )*(ByteFallback )?(Fuse )?(Strip )?)?")


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    """Return the types of the steps of a decoder.

    Raise OptionError for a decoder in which the bytes of a token may depend on later tokens.
    """
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    strips_end = any(part.get("stop") for part in parts if part["type"] == "Strip")
    supported = _SUPPORTED_DECODERS.fullmatch("".join(f"{kind} " for kind in kinds))
    if strips_end or not supported or (decoder and not parts):
        raise OptionError(
            f"generation with this tokenizer cannot be constrained: its decoder ({', '.join(kinds) or 'none'}) may "
            "change the text of a token when later tokens follow"
        )
    return kinds


def _byte_level(name: str) -> bytes:
    """Return the bytes of a token by the decoder ByteLevel."""
    try:
        return bytes(_byte_of()[character] for character in name)
    except KeyError:  # an added token, which is not in the alphabet
        return name.encode()


@functools.cache
def _byte_of() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet, in which printable characters are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _measure_bytes(
    tokenizer: Tokenizer, names: Mapping[int, str], byte_fallback: bool
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return the bytes of ids at the beginning of a text and later, measured by decoding.

    names: the tokens by id. byte_fallback: whether tokens such as <0xE6> are bytes.
    """
    matches = {i: _BYTE.fullmatch(name) for i, name in names.items()} if byte_fallback else {}
    byte_tokens = {i: bytes([int(match[1], 16)]) for i, match in matches.items() if match}
    ids = [i for i in names if i not in byte_tokens or byte_tokens[i] < b"\x80"]
    alone = dict(zip(ids, tokenizer.decode_batch([[i] for i in ids]), strict=True))
    before = next((i for i in ids if alone[i].strip()), None)
    if before is None:
        return {}, {}
    pairs = tokenizer.decode_batch([[before, i] for i in ids])
    skip = len(alone[before])
    partial_characters = {i: form for i, form in byte_tokens.items() if i not in alone}
    first = {i: text.encode() for i, text in alone.items()}
    later = {i: text[skip:].encode() for i, text in zip(ids, pairs, strict=True)}
    return first | partial_characters, later | partial_characters


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _verify(tokenizer: Tokenizer, first: Mapping[int, bytes], later: Mapping[int, bytes], word_level: bool) -> None:
    """Raise OptionError if the text of a sequence of ids is not the concatenation of their bytes."""
    checked = [i for i, form in later.items() if word_level or _is_text(form)]
    # If an id has other bytes at the beginning, check that it has its later bytes in second place.
    second = next((i for i in checked if first[i] != later[i]), checked[0] if checked else 0)
    sequences = [[i, second] for i in checked] + [checked, checked[::-1]] if checked else []
    for ids, text in zip(sequences, tokenizer.decode_batch(sequences), strict=True):
        expected = b"".join([first[ids[0]], *(later[i] for i in ids[1:])]).decode()
        if text != (expected[:-1] if word_level else expected):
            raise OptionError(
                "generation with this tokenizer cannot be constrained: the text of a sequence of ids is not the "
                "concatenation of the texts of each id"
            )


def _is_text(form: bytes) -> bool:
    try:
        form.decode()
    except UnicodeDecodeError:
        return False
    return True


def _restrict(
    first: Mapping[int, bytes], later: Mapping[int, bytes]
) -> tuple[dict[int, bytes], dict[int, bytes], str, frozenset[str]]:
    """Restrict a vocabulary that lacks some bytes to tokens after which each spellable text can be completed.

    A text can be completed after every token if each of its characters is a token, alone or after a space. So no token
    may end within a character, nor in a space if a space is not a token.
    Return first and later bytes, `spellable_texts` and `spellable_alone`: see `Vocabulary`.
    """
    later = {i: form for i, form in later.items() if _is_text(form)}
    alone = {text for form in later.values() if len(text := form.decode()) == 1}
    after_space = {text[1] for form in later.values() if len(text := form.decode()) == 2 and text[0] == " "}
    unit = any_of(alone)
    if " " not in alone:
        later = {i: form for i, form in later.items() if not form.endswith(b" ")}
        unit = f"(?:{unit}| {any_of(after_space)})"
    allowed = {i: form for i, form in first.items() if i in later and not (form.endswith(b" ") and " " not in alone)}
    initials = {text for form in allowed.values() if len(text := form.decode()) == 1}
    if any(later[i] and not form for i, form in allowed.items()) and initials <= alone:
        texts = f"{unit}*"
    else:  # exclude silent first tokens: after one, characters that only a first token spells would be impossible
        allowed = {i: form for i, form in allowed.items() if form}
        texts = f"(?:{any_of(initials)}{unit}*)?"
    return allowed, later, texts, frozenset(alone)


def _llguidance_tokenizer(forms: Sequence[bytes]) -> LLTokenizer:
    """Return a tokenizer of llguidance. forms: the bytes of each id."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Tokens:
        def __init__(self) -> None:
            # llguidance marks special tokens by 0xFF, which does not occur in UTF-8.
            all_bytes = (bytes([byte]) for byte in range(256))
            self.tokens = [*(b"" if b"\xff" in form else form for form in [*forms, *all_bytes]), b"<end>"]
            self.eos_token_id = len(self.tokens) - 1
            self.bos_token_id = None
            self.special_token_ids = [self.eos_token_id]

        def __call__(self, text: bytes | str) -> list[int]:
            return [len(forms) + byte for byte in (text.encode() if isinstance(text, str) else text)]

    return LLTokenizer(TokenizerWrapper(Tokens()))


def literal(text: str) -> str:
    """Return a regular expression for a text, in the common syntax of Rust and Python."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)


def any_of(characters: Iterable[str]) -> str:
    """Return a regular expression for one of some characters, in the common syntax of Rust and Python."""
    points = sorted(map(ord, characters))
    if not points:
        return "[^\\U00000000-\\U0010ffff]"
    gaps = [i for i in range(1, len(points)) if points[i] > points[i - 1] + 1]
    runs = zip([0, *gaps], [*gaps, len(points)], strict=True)
    return "[" + "".join(f"\\U{points[a]:08x}-\\U{points[b - 1]:08x}" for a, b in runs) + "]"
