"""What a model that is run once reads of a text, or of a pair of texts: ids, and the type of each.

The tokenizer's own way is followed in all: what it does not know it reads as its unknown token, as it did while the
model was trained, and a pair is cut longest first, as transformers' tokenizers do (`truncation=True`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from tformer_runtime.base.arrays import Ints
from tformer_runtime.base.errors import InputError, ModelFileError

Pair = tuple[str, str]


class Read(NamedTuple):
    """ids, types: (time,) each."""

    ids: Ints
    types: Ints


@dataclass(frozen=True)
class Window:
    """What is read at once of a text or a pair, with the place of each token.

    ids, types, words, texts: (time,); offsets: (time, 2), the first character of the text and the one after the last;
    own: (time,) bool. words: the number of a token's word in its text; texts: of which text of a pair it is, 0 or 1;
    both −1 where there is none. own: whether it is of a text, and not put around it.
    """

    ids: Ints
    types: Ints
    offsets: Ints
    words: Ints
    texts: Ints
    own: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, found: Encoding) -> Window:
        return cls(
            np.array(found.ids, np.int64),
            np.array(found.type_ids, np.int64),
            np.array(found.offsets, np.int64).reshape(-1, 2),
            _numbered(found.word_ids),
            _numbered(found.sequence_ids),
            np.array(found.special_tokens_mask) == 0,
        )


class Reader:
    """One of the file's tokenizers. Safe to share between threads."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        self._definition = definition
        self._cutting = functools.lru_cache(maxsize=8)(self._make)

    @functools.cached_property
    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = json.loads(self._definition)["model"]
        return model

    @property
    def marks_subwords(self) -> bool:
        """Whether its tokens say that they go on with a word, by a prefix."""
        return bool(self._model.get("continuing_subword_prefix"))

    @property
    def unknown(self) -> int | None:
        """What it reads for what it does not know."""
        name = self._model.get("unk_token")
        return self.id_of(name) if name else self._model.get("unk_id")

    def id_of(self, token: str) -> int | None:
        """The id of what the vocabulary calls so."""
        found: int | None = self._cutting(None).token_to_id(token)
        return found

    def token(self, id_: int) -> str:
        """What the vocabulary calls an id; nothing for what is none."""
        return str(self._cutting(None).id_to_token(id_) or "")

    @property
    def size(self) -> int:
        """How many ids the vocabulary has."""
        return int(self._cutting(None).get_vocab_size())

    def ids(self, text: str) -> list[int]:
        """Those of a text alone, with nothing around it."""
        return list(self._cutting(None).encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int] | Ints, special: bool) -> str:
        """The text of ids. special: with the tokens that are put around texts and into them."""
        return str(self._cutting(None).decode(list(map(int, ids)), skip_special_tokens=not special))

    def read(self, text: str | Pair, most: int | None = None) -> Read:
        """A text or a pair with the tokens that belong around it, cut to `most` tokens, those included.

        InputError for what the tokenizer refuses, and for a `most` that leaves no room beside its own tokens.
        """
        found = self._encoded(text, most)
        return Read(np.array(found.ids, np.int64), np.array(found.type_ids, np.int64))

    def window(self, text: str | Pair, most: int | None = None) -> Window:
        """The same as `read`, with the place of each token."""
        return Window.of(self._encoded(text, most))

    def windows(self, text: str | Pair, most: int, stride: int) -> list[Window]:
        """A text in windows of at most `most` tokens, those around it included, each beginning with the last `stride`
        tokens of the one before. Of a pair, the first text is in each and the second is cut.

        InputError where the first leaves no room for the second. Where there is less of it than the stride, half of the
        room is shared.
        """
        room = self.room(most, "" if isinstance(text, str) else (text[0], ""))
        if room < 1:
            what = "tokens around a text" if isinstance(text, str) else "first text and the tokens around both"
            raise InputError(f"the {what} leave no room in a window of {most} tokens: shorten it, or make that longer")
        found = self._encoded(text, most, stride if stride < room else room // 2)
        return [Window.of(found), *map(Window.of, found.overflowing)]

    def room(self, most: int, around: str | Pair = "") -> int:
        """How many tokens of a text a window of `most` has beside those of what is around it in each."""
        return most - len(self._encoded(around, None).ids)

    def _encoded(self, text: str | Pair, most: int | None, stride: int | None = None) -> Encoding:
        first, second = (text, None) if isinstance(text, str) else text
        try:
            return self._cutting(most, stride, second is not None).encode(first, second)
        except InputError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise InputError(f"the tokenizer cannot read the input: {error}") from error

    def _make(self, most: int | None, stride: int | None = None, pair: bool = False) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_str(self._definition)
        except Exception as error:
            raise ModelFileError(f"the file's tokenizer cannot be read ({error}): export the model again") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if most is not None:
            try:
                if stride is None:
                    tokenizer.enable_truncation(most)
                else:
                    tokenizer.enable_truncation(
                        most, stride=stride, strategy="only_second" if pair else "longest_first"
                    )
            except Exception as error:
                raise InputError(f"nothing is left of a text that is cut to {most} tokens: {error}") from error
        return tokenizer


def _numbered(numbers: Sequence[int | None]) -> Ints:
    return np.array([-1 if number is None else number for number in numbers], np.int64)
