"""Between text and ids: the file's tokenizers, refusal of what they do not know, and text that streams.

A tokenizer replaces what is outside its vocabulary by an "unknown" token or drops it without a word. A model then
answers a question that nobody asked, so here it is an InputError that names the character and its place.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from tformer_runtime.errors import InputError, ModelFileError

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Codec:
    """One of the file's tokenizers."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        try:
            self._tokenizer = Tokenizer.from_str(definition)
            model = json.loads(definition)["model"]
        except Exception as error:  # the package raises plain Exception
            raise ModelFileError(f"the file's tokenizer cannot be read ({error}): export the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        unknown = model.get("unk_token")
        self._unknown: int | None = self._tokenizer.token_to_id(unknown) if unknown else model.get("unk_id")
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._is_dropped = functools.lru_cache(maxsize=4096)(self._drops)

    @property
    def size(self) -> int:
        """How many ids there are."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, special: bool, known: int | None = None) -> list[int]:
        """Ids of a text. special: with the tokens that the tokenizer puts around a text. known: how many ids the model
        has, if the tokenizer may have more. InputError names unknowns."""
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
        nothing = all(encoding.special_tokens_mask)  # but what was put around it
        return [] if nothing else list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, id_: int) -> str:
        """What the vocabulary calls an id."""
        return str(self._tokenizer.id_to_token(id_) or id_)

    def is_part(self, id_: int) -> bool:
        """Whether a token is a single byte or no text at all: what it means hangs on the tokens after it."""
        token = self._tokenizer.id_to_token(id_)
        return token is None or id_ in self._special or bool(_BYTE.fullmatch(token))

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


_WINDOW, _CONTEXT = 64, 16


class Detokenizer:
    """Text of a growing sequence of ids, piece by piece.

    A piece is given out once no later token can change it: not in the middle of a character, and not what may turn
    out to be the beginning of a stop string. The pieces together equal the text of all ids, up to the stop string.
    """

    def __init__(self, codec: Codec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, tuple(stop)
        self._ids: list[int] = []
        self._from = 0  # only the ids from here on are decoded again …
        self._base = ""  # … for this was their text's beginning
        self._skip = 0  # … and so much of their text is in it
        self._given = 0
        self.text = ""  # all that is certain
        self.stopped = False  # whether a stop string was met; nothing comes after

    def push(self, token: int) -> str:
        """Add a token; returns what has become certain."""
        self._ids.append(token)
        return "" if self.stopped else self._give(self._certain(), final=False)

    def finish(self) -> str:
        """No more tokens: the rest of the text."""
        if self.stopped:
            return ""
        text = self._codec.decode(self._ids)
        return self._give(text if text.startswith(self.text) else self.text, final=True)

    def _give(self, text: str, final: bool) -> str:
        before = cut(text, self._stop)
        if before is not None:
            text, self.stopped = before, True
        elif not final:
            text = text[: len(text) - _overlap(text, self._stop)]
        piece = text[self._given :] if text.startswith(self.text) else ""
        self.text += piece
        self._given += len(piece)
        return piece

    def _certain(self) -> str:
        """The text that later tokens cannot change."""
        end = len(self._ids)
        while end > self._from and self._codec.is_part(self._ids[end - 1]):
            end -= 1
        window = self._codec.decode(self._ids[self._from : end])
        text = self._base + window[self._skip :].rstrip(_BROKEN)
        if end - self._from > _WINDOW and window and not window.endswith(_BROKEN):
            start = end - _CONTEXT
            context = self._codec.decode(self._ids[start:end])
            if context and window.endswith(context):
                self._from, self._base, self._skip = start, text, len(context)
        return text


def _overlap(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    lengths = (n for s in stop for n in range(min(len(s) - 1, len(text)), 0, -1) if text.endswith(s[:n]))
    return max(lengths, default=0)
