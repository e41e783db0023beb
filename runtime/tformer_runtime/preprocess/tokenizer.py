"""Between text and ids: the file's tokenizers, refusal of what they do not know, and text that streams.

A tokenizer replaces what is outside its vocabulary by an "unknown" token or drops it without a word. A model then
answers a question that nobody asked, so here it is an InputError that names the character and its place.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer, models

from tformer_runtime.base.errors import InputError, ModelFileError


class Codec:
    """One of the file's tokenizers."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        try:
            self._tokenizer = Tokenizer.from_str(definition)
            parts = json.loads(definition)
            model = parts["model"]
        except Exception as error:  # the package raises plain Exception
            raise ModelFileError(f"the file's tokenizer cannot be read ({error}): export the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        unknown = model.get("unk_token")
        self._unknown: int | None = self._tokenizer.token_to_id(unknown) if unknown else model.get("unk_id")
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._decoder: dict[str, Any] | None = parts.get("decoder")
        self._is_dropped = functools.lru_cache(maxsize=4096)(self._drops)

    @property
    def size(self) -> int:
        """How many ids there are."""
        return int(self._tokenizer.get_vocab_size())

    def encode(
        self, text: str, special: bool, known: int | None = None, first: bool = True, last: bool = True
    ) -> list[int]:
        """Ids of a text. special: with the tokens that the tokenizer puts around a text; first, last: with those before
        it, and those after it. known: how many ids the model has, if the tokenizer may have more. InputError names
        unknowns."""
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # a tokenizer without an unknown token may refuse instead
            raise self._refused(text) from error
        covered = bytearray(len(text))
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if (id_ == self._unknown or (known is not None and id_ >= known)) and end > start:
                raise _outside(text[start:end], start)
            covered[start:end] = b"\1" * (end - start)
        if 0 in covered:  # where is not told: offsets after a dropped character are too low
            for at, character in enumerate(text):
                if self._is_dropped(character):
                    raise _outside(character, at)
        own = [i for i, around in enumerate(encoding.special_tokens_mask) if not around]
        if not own:
            return []
        return list(encoding.ids[0 if first else own[0] : None if last else own[-1] + 1])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, id_: int) -> str:
        """What the vocabulary calls an id."""
        return str(self._tokenizer.id_to_token(id_) or id_)

    def piece(self, id_: int) -> str | None:
        """What the decoder is given for an id: nothing for a special token, nor for what is no token."""
        return None if id_ in self._special else self._tokenizer.id_to_token(id_)

    def steps(self) -> list[Step]:
        """The decoder for pieces that come one after another: fresh steps, each of which is fed by the one before."""
        return [make() for make in self._steps]

    @functools.cached_property
    def _steps(self) -> list[Callable[[], Step]]:
        return _makers(self._decoder)

    def _refused(self, text: str) -> InputError:
        """Find the piece that the tokenizer would not encode."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text) if tokenizer.pre_tokenizer else [(text, (0, 0))]
        for piece, (start, _) in pieces:
            try:
                tokenizer.model.tokenize(piece)
            except Exception:
                return _outside(piece, start)
        return InputError("the input holds something outside the model's vocabulary")

    def _drops(self, character: str) -> bool:
        """Whether the vocabulary lacks a character, other than those that the tokenizer leaves out by design."""
        tokenizer = self._tokenizer
        try:
            if tokenizer.encode(character, add_special_tokens=False).ids:
                return False
        except Exception:  # a tokenizer that refuses does not drop
            return False
        if tokenizer.normalizer is not None:
            character = tokenizer.normalizer.normalize_str(character)
        if tokenizer.pre_tokenizer is not None:
            return bool(tokenizer.pre_tokenizer.pre_tokenize_str(character))
        return bool(character)


def _outside(piece: str, at: int) -> InputError:
    return InputError(f"{piece!r} (character {at + 1} of the input) is not in the model's vocabulary")


def cut(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first stop string, or None if it holds none."""
    places = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(places)] if places else None


class Detokenizer:
    """Text of a growing sequence of ids, piece by piece.

    What is given out is never taken back, and the pieces together equal the text of all ids, up to the first stop
    string. So a piece waits until no later token can change it (a character's other bytes, a run of byte tokens that
    may yet prove broken), extend its last grapheme cluster (an accent, the rest of an emoji), or complete a stop
    string that it begins.

    A token's cost does not grow with the text: its characters pass through the decoder once, and only what waits is
    looked at again. Beyond _LONG characters and the longest stop string, which takes a cluster or a run of bytes out
    of all proportion, what waits is looked at only each time it has doubled, so a character's cost stays constant
    on average. (What tokenizers can only decode as a whole, see _makers, comes in one piece at the end.)
    """

    def __init__(self, codec: Codec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, tuple(stop)
        self._steps = codec.steps()
        self._short = _LONG + max(map(len, self._stop), default=0)
        self._waiting = ""  # decoded for certain, from a cluster's beginning
        self._fresh: list[str] = []  # decoded after that, not looked at yet
        self._wait_for = 0  # how many characters of it are needed to look
        self._given: list[str] = []
        self._finished = False
        self.stopped = False  # whether a stop string was met; nothing comes after

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._given)

    def push(self, token: int) -> str:
        """Add a token; returns what has become certain."""
        piece = self._codec.piece(token)
        if piece is None or self._finished:
            return ""
        pieces = [piece]
        for step in self._steps:
            pieces = [out for piece in pieces for out in step.push(piece)]
        return self._give(pieces)

    def finish(self) -> str:
        """No more tokens: the rest of the text."""
        if self._finished:
            return ""
        self._finished = True
        pieces: list[str] = []
        for step in self._steps:
            pieces = [out for piece in pieces for out in step.push(piece)] + step.finish()
        return self._give(pieces)

    def _give(self, pieces: Sequence[str]) -> str:
        self._fresh += filter(None, pieces)
        self._wait_for -= sum(map(len, pieces))
        if not self._finished and (not self._fresh or self._wait_for > 0):
            return ""
        text = "".join((self._waiting, *self._fresh))
        self._fresh.clear()
        before = cut(text, self._stop)
        # A stop string that begins before one that is complete may be completed by the next token.
        end = len(text) if self._finished else len(text) - _overlap(text, self._stop)
        if before is not None and len(before) <= end:
            end, text = len(before), before
            self.stopped = self._finished = True
        elif not self._finished:
            end = _boundary(text, end)
        self._waiting = text[end:]
        self._wait_for = len(self._waiting) if len(self._waiting) > self._short else 0
        if end:
            self._given.append(text[:end])
        return text[:end]


_LONG = 256
_ACCENT = "\N{COMBINING ACUTE ACCENT}"  # one of the characters that extend any cluster, but for control characters


@functools.cache
def _cluster() -> Any:
    """Unicode's extended grapheme cluster (UAX #29). Only what streams or stops at a text waits for its import."""
    import regex

    return regex.compile(r"\X")


def _boundary(text: str, most: int) -> int:
    """The last place, at `most` or before, where a cluster ends whatever may follow the text."""
    follower = "\n" if text.endswith("\r") else _ACCENT
    starts: list[int] = [match.start() for match in _cluster().finditer(text + follower)]
    return max(start for start in starts if start <= most)


def _overlap(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    lengths = (n for s in stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
    return max(lengths, default=0)


class Step(Protocol):
    """A step of a decoder: pieces in, and pieces out as soon as no later one can change them."""

    def push(self, piece: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


Decode = Callable[[list[str]], str]


def _makers(decoder: dict[str, Any] | None) -> list[Callable[[], Step]]:
    """Makers of a decoder's steps, from its JSON.

    What a step does to a piece is left to the tokenizers package. Known here is what that hangs on: on the piece
    alone, on whether it is the first or the last, or on its neighbours. A step of which this is not known, or which
    rewrites the text as a whole, waits for the end, together with the steps after it.
    """
    if decoder is None:
        return [functools.partial(_Each, " ".join, [""])]
    makers: list[Callable[[], Step]] = []
    whole = False  # whether the steps so far make one piece of all, of which parts arrive
    steps = _flat(decoder)
    for number, step in enumerate(steps):
        decode = _decode(step)
        match step.get("type"), whole:
            case "Fuse", _:
                whole = True
            case "ByteLevel", False:
                makers.append(_ByteLevel)
                whole = True
            case "ByteFallback", False:
                makers.append(_ByteFallback)
            case "Replace" | "Strip", False:
                makers.append(functools.partial(_Each, decode))
            case "Metaspace" | "WordPiece", False:
                makers.append(functools.partial(_Each, decode, [""]))
            case "BPEDecoder", False:
                makers.append(functools.partial(_ButLast, decode))
            case "Metaspace", True:  # a character at a time
                makers.append(functools.partial(_Each, decode))
            case "Replace", True if len(step["pattern"].get("String", "")) == 1:
                makers.append(functools.partial(_Each, decode))
            case "Strip", True:
                makers.append(functools.partial(_Strip, step["content"], step["start"], step["stop"]))
            case _:
                rest = _decode({"type": "Sequence", "decoders": steps[number:]})
                return [*makers, functools.partial(_AtEnd, rest, whole)]
    return makers


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _decode(decoder: dict[str, Any]) -> Decode:
    """The package's own function of a decoder: pieces → text."""
    tokenizer = json.loads(Tokenizer(models.WordLevel()).to_str())
    decode: Decode = Tokenizer.from_str(json.dumps(tokenizer | {"decoder": decoder})).decoder.decode
    return decode


class _Each:
    """A step that rewrites every piece by itself. before: what stands before a piece that is not the first."""

    def __init__(self, decode: Decode, before: Sequence[str] = ()) -> None:
        self._decode, self._later = decode, before
        self._before: Sequence[str] = ()

    def push(self, piece: str) -> list[str]:
        before, self._before = self._before, self._later
        return [self._decode([*before, piece])]

    def finish(self) -> list[str]:
        return []


class _ButLast:
    """A step that rewrites every piece by itself, the last one in another way."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._held: list[str] = []

    def push(self, piece: str) -> list[str]:
        held, self._held = self._held, [piece]
        return [self._decode([*held, ""])] if held else []

    def finish(self) -> list[str]:
        return [self._decode(self._held)] if self._held else []


class _ByteFallback:
    """Pieces like <0xE6> are bytes. A run of them that is no UTF-8 is as many � as it has bytes, valid ones too."""

    _BYTE = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # + is what Rust's number parser takes
    _BROKEN = "\N{REPLACEMENT CHARACTER}"

    def __init__(self) -> None:
        self._run = bytearray()  # that may be UTF-8
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False  # whether the run turned out not to be

    def push(self, piece: str) -> list[str]:
        byte = self._BYTE.fullmatch(piece)
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
        broken = [self._BROKEN] * len(self._run)
        self._run.clear()
        return broken


# GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
_SELVES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_ALPHABET = {chr(byte): byte for byte in _SELVES}
_ALPHABET |= {chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_SELVES}))}


class _ByteLevel:
    """A byte a character, in GPT-2's alphabet; all together they are UTF-8, with � for what is not."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> list[str]:
        try:
            data = bytes(_ALPHABET[character] for character in piece)
        except KeyError:  # an added token
            data = piece.encode()
        return [self._utf8.decode(data)]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _Strip:
    """Up to `start` of a character are taken from the text's beginning, up to `stop` from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, piece: str) -> list[str]:
        text = self._held + piece
        leading = min(len(text) - len(text.lstrip(self._content)), self._start)
        text = text[leading:]
        self._start = 0 if text else self._start - leading
        end = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._held = text[end:]
        return [text[:end]]

    def finish(self) -> list[str]:
        return []


class _AtEnd:
    """Any steps at all. whole: the pieces are parts of one."""

    def __init__(self, decode: Decode, whole: bool) -> None:
        self._decode, self._whole = decode, whole
        self._pieces: list[str] = []

    def push(self, piece: str) -> list[str]:
        self._pieces.append(piece)
        return []

    def finish(self) -> list[str]:
        return [self._decode(["".join(self._pieces)] if self._whole else self._pieces)]
