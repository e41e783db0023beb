"""Between text and ids, for generation: the tokenizers of the file, and text of a stream.

A tokenizer replaces unknown characters by an "unknown" token, or drops them silently. The model would then answer to
another text, so an unknown character raises an InputError with its position.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tformer_runtime.base.errors import InputError, ModelFileError, error_summary, quotable
from tformer_runtime.base.foreign_errors import foreign_errors
from tformer_runtime.base.validation import surrogate_in
from tformer_runtime.preprocess.tokenizer_growth import check_growth, check_settings


class Codec:
    """A tokenizer of the file, which refuses unknown characters."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        from tokenizers import Tokenizer  # takes 5 ms, and files without a text never need it

        with foreign_errors(unreadable_tokenizer):
            parts = json.loads(definition)
            check_growth(parts)
            check_settings(parts)
            self._tokenizer = Tokenizer.from_str(definition)
            model = parts["model"]
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            unknown = model.get("unk_token")
            self._unknown: int | None = self._tokenizer.token_to_id(unknown) if unknown else model.get("unk_id")
            special = {i: token for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
            # One that is normalized to another name is not a special token for the package when it decodes.
            self._special = {i for i, token in special.items() if self._tokenizer.id_to_token(i) == token.content}
            self._decoder: dict[str, Any] | None = parts.get("decoder")
        self._is_dropped = functools.lru_cache(maxsize=4096)(self._drops)

    @property
    def size(self) -> int:
        """The number of ids in the vocabulary."""
        return int(self._tokenizer.get_vocab_size())

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        vocabulary_size: int | None = None,
        starts_prompt: bool = True,
        ends_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a text.

        add_special_tokens: add the special tokens that the tokenizer puts around a text.
        vocabulary_size: the number of ids of the model, if the tokenizer may have more.
        starts_prompt, ends_prompt: keep the special tokens before the text, and those after it.
        Raise InputError for a character outside the vocabulary.
        """
        check_text(text)
        with foreign_errors(lambda _: self._refused(text)):  # a tokenizer without an unknown token may refuse instead
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        covered = bytearray(len(text))
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if (id_ == self._unknown or (vocabulary_size is not None and id_ >= vocabulary_size)) and end > start:
                raise _outside(text[start:end], start)
            covered[start:end] = b"\1" * (end - start)
        if 0 in covered:  # offsets are too low after a dropped character, so search for it
            for index, character in enumerate(text):
                if self._is_dropped(character):
                    raise _outside(character, index)
        in_text = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        if not in_text:
            return []
        return list(encoding.ids[0 if starts_prompt else in_text[0] : None if ends_prompt else in_text[-1] + 1])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with foreign_errors(unreadable_tokenizer):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, id_: int) -> str:
        """Return the token of an id in the vocabulary; the id if it is unknown."""
        return str(self._tokenizer.id_to_token(id_) or id_)

    def token_bytes(self, id_: int) -> bytes | None:
        """Return the bytes of an id alone, also of one that is a part of a character; None if they are unknown."""
        text = self.decode([id_])
        if _ByteFallbackStep.BROKEN not in text:
            return text.encode()
        token, kinds = self.token(id_), json.dumps(self._decoder)
        if '"ByteLevel"' in kinds and all(character in _ALPHABET for character in token):
            return bytes(_ALPHABET[character] for character in token)
        byte = _ByteFallbackStep.BYTE.fullmatch(token) if '"ByteFallback"' in kinds else None
        return bytes([int(byte[1], 16)]) if byte else None

    def piece(self, id_: int) -> str | None:
        """Return the input of the decoder for an id; None for a special token and an unknown id."""
        return None if id_ in self._special else self._tokenizer.id_to_token(id_)

    def decode_steps(self) -> list[DecodeStep]:
        """Return new steps of an incremental decoder. The output of each step is the input of the next."""
        return [create() for create in self._step_factories]

    @functools.cached_property
    def _step_factories(self) -> list[Callable[[], DecodeStep]]:
        return _decode_step_factories(self._decoder)

    def _refused(self, text: str) -> InputError:
        """Return an error with the piece that the tokenizer refused."""
        tokenizer = self._tokenizer
        outside = InputError("the input holds something outside the model's vocabulary")
        try:
            with foreign_errors(lambda _: outside):
                if tokenizer.normalizer is not None:
                    text = tokenizer.normalizer.normalize_str(text)
                pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, (0, 0))]
                for piece, (start, _) in pieces:
                    outside = _outside(piece, start)
                    tokenizer.model.tokenize(piece)
        except InputError as error:
            return error
        return InputError("the input holds something outside the model's vocabulary")

    def _drops(self, character: str) -> bool:
        """Return whether the tokenizer drops a character because of its vocabulary, and not by design."""
        tokenizer = self._tokenizer
        try:
            with foreign_errors(lambda _: _outside(character, 0)):
                if tokenizer.encode(character, add_special_tokens=False).ids:
                    return False
        except InputError:  # the tokenizer refuses the character
            return False
        if tokenizer.normalizer is not None:
            character = tokenizer.normalizer.normalize_str(character)
        if tokenizer.pre_tokenizer is not None:
            return bool(tokenizer.pre_tokenizer.pre_tokenize_str(character))
        return bool(character)


def unreadable_tokenizer(error: BaseException) -> ModelFileError:
    """Return the error for a tokenizer of the file that cannot be read."""
    return ModelFileError(f"the file's tokenizer cannot be read ({error_summary(error)}): export the model again")


def check_text(text: str) -> None:
    """Raise InputError for a text with half a character, which no tokenizer reads."""
    if (found := surrogate_in(text)) is not None:
        raise InputError(f"the input holds {found}")


def _outside(piece: str, index: int) -> InputError:
    return InputError(f"{quotable(piece)!r} (character {index + 1} of the input) is not in the model's vocabulary")


def text_before_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first stop string; None if it contains none."""
    indices = [index for index in (text.find(string) for string in stop) if index >= 0]
    return text[: min(indices)] if indices else None


class Detokenizer:
    """Incremental decoding: the text of a growing sequence of ids, in pieces.

    The concatenated pieces equal the text of all ids, up to the first stop string. A piece is emitted when no later
    token can change it. It waits for the other bytes of a character, for the end of its last grapheme cluster (an
    accent, the rest of an emoji), and for the rest of a stop string.

    The cost of a token does not grow with the text: each character passes through the decoder once, and only waiting
    text is examined again. Waiting text that is longer than _MAX_CLUSTER_CHARACTERS and the longest stop string is
    examined each time its length has doubled, so the amortized cost of a character is constant. The text of a decoder
    that needs the whole sequence (see `_decode_step_factories`) comes in one piece at the end.
    """

    def __init__(self, codec: Codec, stop: Sequence[str] = ()) -> None:
        """stop: stop strings."""
        self._codec, self._stop = codec, tuple(stop)
        self._steps = codec.decode_steps()
        self._max_examined = _MAX_CLUSTER_CHARACTERS + max(map(len, self._stop), default=0)
        self._waiting = ""  # decoded and examined, from the beginning of a cluster
        self._fresh: list[str] = []  # decoded after that, and not examined
        self._missing_characters = 0  # of fresh text, before the next examination
        self._emitted: list[str] = []
        self._finished = False
        self.stopped = False  # whether a stop string was found; no text follows

    @property
    def text(self) -> str:
        """The text of all pieces so far."""
        return "".join(self._emitted)

    def push(self, token: int) -> str:
        """Add a token. Return the text that has become final."""
        piece = self._codec.piece(token)
        if piece is None or self._finished:
            return ""
        pieces = [piece]
        for step in self._steps:
            pieces = [out for piece in pieces for out in step.push(piece)]
        return self._emit(pieces)

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self._finished:
            return ""
        self._finished = True
        pieces: list[str] = []
        for step in self._steps:
            pieces = [out for piece in pieces for out in step.push(piece)] + step.finish()
        return self._emit(pieces)

    def _emit(self, pieces: Sequence[str]) -> str:
        self._fresh += filter(None, pieces)
        self._missing_characters -= sum(map(len, pieces))
        if not self._finished and (not self._fresh or self._missing_characters > 0):
            return ""
        text = "".join((self._waiting, *self._fresh))
        self._fresh.clear()
        before = text_before_stop(text, self._stop)
        # The next token may complete a stop string that begins before a complete one.
        end = len(text) if self._finished else len(text) - _overlap(text, self._stop)
        if before is not None and len(before) <= end:
            end, text = len(before), before
            self.stopped = self._finished = True
        elif not self._finished:
            end = cluster_boundary(text, end)
        self._waiting = text[end:]
        self._missing_characters = len(self._waiting) if len(self._waiting) > self._max_examined else 0
        if end:
            self._emitted.append(text[:end])
        return text[:end]


_MAX_CLUSTER_CHARACTERS = 256  # of a common grapheme cluster, or a common run of byte tokens
_ACCENT = "\N{COMBINING ACUTE ACCENT}"  # a character that extends any cluster, except control characters


@functools.cache
def _cluster() -> Any:
    """Return the pattern of Unicode's extended grapheme cluster (UAX #29). The import of `regex` is slow."""
    import regex

    return regex.compile(r"\X")


def cluster_boundary(text: str, limit: int) -> int:
    """Return the last index, up to `limit`, where a cluster ends regardless of the following text."""
    follower = "\n" if text.endswith("\r") else _ACCENT
    starts: list[int] = [match.start() for match in _cluster().finditer(text + follower)]
    return max(start for start in starts if start <= limit)


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is the beginning of a stop string."""
    lengths = (n for s in stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
    return max(lengths, default=0)


class DecodeStep(Protocol):
    """A step of a decoder: pieces in, and pieces out as soon as no later piece can change them."""

    def push(self, piece: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


DecodeFunction = Callable[[list[str]], str]


def _decode_step_factories(decoder: dict[str, Any] | None) -> list[Callable[[], DecodeStep]]:
    """Return factories of the steps of a decoder. decoder: its JSON; None for joining by spaces.

    The tokenizers package decodes the pieces. This function knows the inputs of each step: the piece alone, whether it
    is the first or the last, or its neighbours. A step that is unknown, or that needs the whole text, waits for the
    end, with all steps after it.
    """
    if decoder is None:
        return [functools.partial(_PieceStep, " ".join, [""])]
    factories: list[Callable[[], DecodeStep]] = []
    fused = False  # whether the pieces so far are parts of one piece
    steps = _flatten(decoder)
    for number, step in enumerate(steps):
        decode = _decode_function(step)
        match step.get("type"), fused:
            case "Fuse", _:
                fused = True
            case "ByteLevel", False:
                factories.append(_ByteLevelStep)
                fused = True
            case "ByteFallback", False:
                factories.append(_ByteFallbackStep)
            case "Replace" | "Strip", False:
                factories.append(functools.partial(_PieceStep, decode))
            case "Metaspace" | "WordPiece", False:
                factories.append(functools.partial(_PieceStep, decode, [""]))
            case "BPEDecoder", False:
                factories.append(functools.partial(_LastDiffersStep, decode))
            case "Metaspace", True:  # rewrites single characters
                factories.append(functools.partial(_PieceStep, decode))
            case "Replace", True if len(step["pattern"].get("String", "")) == 1:
                factories.append(functools.partial(_PieceStep, decode))
            case "Strip", True:
                factories.append(functools.partial(_StripStep, step["content"], step["start"], step["stop"]))
            case _:
                rest = _decode_function({"type": "Sequence", "decoders": steps[number:]})
                return [*factories, functools.partial(_AtEndStep, rest, fused)]
    return factories


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _decode_function(decoder: dict[str, Any]) -> DecodeFunction:
    """Return the function of the tokenizers package for a decoder, from pieces to text."""
    from tokenizers import Tokenizer, models

    tokenizer = json.loads(Tokenizer(models.WordLevel()).to_str())
    with foreign_errors(unreadable_tokenizer):
        decode: DecodeFunction = Tokenizer.from_str(json.dumps(tokenizer | {"decoder": decoder})).decoder.decode

    def decode_or_refuse(pieces: Any) -> str:
        with foreign_errors(unreadable_tokenizer):
            return decode(pieces)

    return decode_or_refuse


class _PieceStep:
    """A step that rewrites every piece independently, the first in another way than later ones."""

    def __init__(self, decode: DecodeFunction, context: Sequence[str] = ()) -> None:
        """context: pieces that `decode` needs before a piece that is not the first."""
        self._decode, self._later_context = decode, context
        self._context: Sequence[str] = ()

    def push(self, piece: str) -> list[str]:
        context, self._context = self._context, self._later_context
        return [self._decode([*context, piece])]

    def finish(self) -> list[str]:
        return []


class _LastDiffersStep:
    """A step that rewrites every piece independently, the last in another way than earlier ones."""

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode
        self._previous: list[str] = []  # the latest piece, if there is one

    def push(self, piece: str) -> list[str]:
        previous, self._previous = self._previous, [piece]
        return [self._decode([*previous, ""])] if previous else []

    def finish(self) -> list[str]:
        return [self._decode(self._previous)] if self._previous else []


class _ByteFallbackStep:
    """A step that joins pieces like <0xE6>, which are bytes, to characters.

    A run of bytes that is not UTF-8 becomes one � per byte, also for its valid bytes.
    """

    BYTE = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # the number parser of Rust accepts a plus sign
    BROKEN = "\N{REPLACEMENT CHARACTER}"

    def __init__(self) -> None:
        self._run = bytearray()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False  # whether the run is not UTF-8

    def push(self, piece: str) -> list[str]:
        byte = self.BYTE.fullmatch(piece)
        if byte is None:
            return [*self.finish(), piece]
        self._run.append(int(byte[1], 16))
        if not self._broken:
            try:
                self._utf8.decode(self._run[-1:])
            except UnicodeDecodeError:
                self._broken = True
        return self._all_broken() if self._broken else []

    def finish(self) -> list[str]:
        self._utf8.reset()
        self._broken = False
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return self._all_broken()
        self._run.clear()
        return [text] if text else []

    def _all_broken(self) -> list[str]:
        broken = [self.BROKEN] * len(self._run)
        self._run.clear()
        return broken


# The alphabet of GPT-2: printable Latin-1 characters are their bytes. Characters from U+0100 on are the other bytes.
_PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_ALPHABET = {chr(byte): byte for byte in _PRINTABLE_BYTES}
_ALPHABET |= {chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE_BYTES}))}


class _ByteLevelStep:
    """A step from characters of GPT-2's alphabet, one per byte, to UTF-8 text. Invalid bytes become �."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        try:
            data = bytes(_ALPHABET[character] for character in piece)
        except KeyError:  # an added token, which is not in the alphabet
            data = piece.encode()
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _StripStep:
    """A step that removes up to `start` characters `content` from the start of the text, and `stop` from the end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._tail = ""  # to be removed if the text ends here

    def push(self, piece: str) -> list[str]:
        text = self._tail + piece
        leading = min(len(text) - len(text.lstrip(self._content)), self._start)
        text = text[leading:]
        self._start = 0 if text else self._start - leading
        end = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._tail = text[end:]
        return [text[:end]]

    def finish(self) -> list[str]:
        return []


class _AtEndStep:
    """Any steps, run once on all pieces."""

    def __init__(self, decode: DecodeFunction, fused: bool) -> None:
        """fused: whether the pieces are parts of one piece."""
        self._decode, self._fused = decode, fused
        self._pieces: list[str] = []

    def push(self, piece: str) -> list[str]:
        self._pieces.append(piece)
        return []

    def finish(self) -> list[str]:
        return [self._decode(["".join(self._pieces)] if self._fused else self._pieces)]
