"""What a model that is run once reads of a text, or of a pair of texts: ids, and the type of each.

The tokenizer's own way is followed in all: what it does not know it reads as its unknown token, as it did while the
model was trained, and a pair is cut longest first, as transformers' tokenizers do (`truncation=True`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tformer_runtime.errors import InputError, ModelFileError

Ints = npt.NDArray[np.int64]
Pair = tuple[str, str]


class Read(NamedTuple):
    """ids, types: (time,) each."""

    ids: Ints
    types: Ints


class Reader:
    """One of the file's tokenizers. Safe to share between threads."""

    def __init__(self, definition: str) -> None:
        """definition: a tokenizer in tokenizers' JSON format."""
        self._definition = definition
        self._cutting = functools.lru_cache(maxsize=8)(self._make)

    def read(self, text: str | Pair, most: int | None = None) -> Read:
        """A text or a pair with the tokens that belong around it, cut to `most` tokens, those included.

        InputError for what the tokenizer refuses, and for a `most` that leaves no room beside its own tokens.
        """
        first, second = (text, None) if isinstance(text, str) else text
        tokenizer = self._cutting(most)
        try:
            found = tokenizer.encode(first, second)
        except Exception as error:  # the package raises plain Exception
            raise InputError(f"the tokenizer cannot read the input: {error}") from error
        return Read(np.array(found.ids, np.int64), np.array(found.type_ids, np.int64))

    def _make(self, most: int | None) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_str(self._definition)
        except Exception as error:
            raise ModelFileError(f"the file's tokenizer cannot be read ({error}): export the model again") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if most is not None:
            try:
                tokenizer.enable_truncation(most)
            except Exception as error:
                raise InputError(f"nothing is left of a text that is cut to {most} tokens: {error}") from error
        return tokenizer
