"""From a text, or a pair of texts, to ids and token types, for single-pass models.

Results are those of transformers' tokenizers: unknown text becomes the unknown token, and truncation cuts the longer
text of a pair first (`truncation=True`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.base.arrays import Ints
from tformer_runtime.base.errors import InputError, quotable
from tformer_runtime.base.foreign_errors import foreign_errors
from tformer_runtime.preprocess.tokenizer import check_text, unreadable_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Pair = tuple[str, str]


class EncodedText(Struct, frozen=True):
    """ids, types: (time,) each."""

    ids: Ints
    types: Ints


class TextWindow(Struct, frozen=True):
    """A window of a text or a pair, with the offsets of each token.

    ids, types: (time,).
    offsets: (time, 2), the characters of a token in its text; the end is exclusive.
    words: (time,), the index of a token's word in its text; −1 without one.
    texts: (time,), the index of a token's text in a pair; −1 for a special token.
    in_text: (time,) bool, whether a token is part of a text.
    """

    ids: Ints
    types: Ints
    offsets: Ints
    words: Ints
    texts: Ints
    in_text: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, encoding: Encoding, last_text: int) -> TextWindow:
        """last_text: 1 of a pair, 0 of a text. Without a post-processor the library forgets to which text of a pair the
        tokens of later windows belong: to the last one.
        """
        in_text = np.array(encoding.special_tokens_mask) == 0
        texts = _none_as_minus_1(encoding.sequence_ids)
        texts[in_text & (texts < 0)] = last_text
        return cls(
            np.array(encoding.ids, np.int64),
            np.array(encoding.type_ids, np.int64),
            np.array(encoding.offsets, np.int64).reshape(-1, 2),
            _none_as_minus_1(encoding.word_ids),
            texts,
            in_text,
        )


class TextReader:
    """A tokenizer of the file, which reads unknown text and can truncate. Safe to share between threads."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        self._definition = definition
        self._tokenizer = functools.lru_cache(maxsize=8)(self._make_tokenizer)  # by its truncation

    @functools.cached_property
    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = json.loads(self._definition)["model"]
        return model

    @property
    def marks_subwords(self) -> bool:
        """Whether tokens inside a word have a prefix, such as ## of WordPiece."""
        return bool(self._model.get("continuing_subword_prefix"))

    @property
    def unknown(self) -> int | None:
        """The id of the unknown token; None without one."""
        name = self._model.get("unk_token")
        return self.id_of(name) if name else self._model.get("unk_id")

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary; None for an unknown one."""
        id_: int | None = self._tokenizer(None).token_to_id(token)
        return id_

    def token(self, id_: int) -> str:
        """Return the token of an id in the vocabulary; empty for an unknown id."""
        return str(self._tokenizer(None).id_to_token(id_) or "")

    @property
    def size(self) -> int:
        """The number of ids in the vocabulary."""
        return int(self._tokenizer(None).get_vocab_size())

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return list(self._tokenizer(None).encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int] | Ints, special: bool) -> str:
        """Return the text of ids. special: whether it includes special tokens."""
        return str(self._tokenizer(None).decode(list(map(int, ids)), skip_special_tokens=not special))

    def read(self, text: str | Pair, max_tokens: int | None = None) -> EncodedText:
        """Tokenize a text or a pair, with special tokens.

        max_tokens: truncate to this length, special tokens included; None for no limit.
        Raise InputError for a text that the tokenizer refuses, and if special tokens leave no room for a text.
        """
        encoding = self._encode(text, max_tokens)
        return EncodedText(np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64))

    def window(self, text: str | Pair, max_tokens: int | None = None) -> TextWindow:
        """Tokenize as `read` does, with the offsets of each token."""
        return TextWindow.of(self._encode(text, max_tokens), int(not isinstance(text, str)))

    def windows(self, text: str | Pair, max_tokens: int, stride: int) -> list[TextWindow]:
        """Tokenize a text in windows. Of a pair, each window has the whole first text and a part of the second.

        max_tokens: of a window, special tokens included.
        stride: tokens of the previous window that are repeated; half of the room for the text if that is less.
        Raise InputError if the first text and special tokens leave no room for the second.
        """
        room = self.room(max_tokens, "" if isinstance(text, str) else (text[0], ""))
        if room < 1:
            parts = "tokens around a text" if isinstance(text, str) else "first text and the tokens around both"
            raise InputError(
                f"the {parts} leave no room in a window of {max_tokens} tokens: shorten the text, or allow longer "
                "windows"
            )
        encoding = self._encode(text, max_tokens, stride if stride < room else room // 2)
        last_text = int(not isinstance(text, str))
        return [TextWindow.of(window, last_text) for window in (encoding, *encoding.overflowing)]

    def room(self, max_tokens: int, repeated: str | Pair = "") -> int:
        """Return the tokens that a window has for a text, besides special tokens and a text that every window has."""
        return max_tokens - len(self._encode(repeated, None).ids)

    def _encode(self, text: str | Pair, max_tokens: int | None, stride: int | None = None) -> Encoding:
        first, second = (text, None) if isinstance(text, str) else text
        check_text(first)
        check_text(second or "")
        tokenizer = self._tokenizer(max_tokens, stride, second is not None)
        with foreign_errors(lambda error: InputError(f"the tokenizer cannot read the input: {quotable(error)}")):
            return tokenizer.encode(first, second)

    def _make_tokenizer(self, max_tokens: int | None, stride: int | None = None, pair: bool = False) -> Tokenizer:
        """Return the tokenizer with truncation to `max_tokens`, in windows if there is a stride."""
        from tokenizers import Tokenizer  # as late as in `tokenizer.Codec`

        with foreign_errors(unreadable_tokenizer):
            tokenizer = Tokenizer.from_str(self._definition)
            tokenizer.no_padding()
            tokenizer.no_truncation()
        if max_tokens is not None:
            with foreign_errors(
                lambda error: InputError(f"nothing is left of a text that is cut to {max_tokens} tokens: {error}")
            ):
                if stride is None:
                    tokenizer.enable_truncation(max_tokens)
                else:
                    strategy = "only_second" if pair else "longest_first"
                    tokenizer.enable_truncation(max_tokens, stride=stride, strategy=strategy)
        return tokenizer


def _none_as_minus_1(numbers: Sequence[int | None]) -> Ints:
    return np.array([-1 if number is None else number for number in numbers], np.int64)
