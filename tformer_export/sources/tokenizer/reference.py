"""A transformers tokenizer as the reference for its conversions, for the source or the target language."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class CandidateTokenizer(NamedTuple):
    """A converted tokenizer to be compared. unknowns: ids that it may read where the original reads an unknown id."""

    tokenizer: Tokenizer
    unknowns: frozenset[int] = frozenset()


class ReferenceTokenizer:
    """A transformers tokenizer. target: read the target language, which some tokenizers read differently."""

    def __init__(self, tokenizer: Any, target: bool = False) -> None:
        self.tokenizer, self.target = tokenizer, target
        self.kind = type(tokenizer).__name__
        self.unknown: int | None = tokenizer.unk_token_id
        self.special = set(tokenizer.all_special_ids)

    @functools.cached_property
    def models(self) -> list[Any]:
        """The distinct SentencePiece models (ModelProto) among its attributes."""
        try:
            from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
        except ImportError:
            return []
        values = vars(self.tokenizer).values()
        protos = {v.serialized_model_proto() for v in values if isinstance(v, SentencePieceProcessor)}
        return [sentencepiece_model_pb2.ModelProto.FromString(text) for text in sorted(protos)]

    @functools.cached_property
    def size(self) -> int:
        """The number of ids: more than its length if source and target have separate vocabularies."""
        pieces = [p.piece for model in self.models for p in model.pieces]
        around = self.encode("a") if self.can_read else []  # codes of languages may have greater ids
        with self.mode() as tokenizer:
            known = [int(tokenizer.convert_tokens_to_ids(piece)) for piece in pieces]
        return max(len(self.tokenizer), *(i + 1 for i in (*known, *around)))

    def token(self, id_: int) -> str | None:
        """Return the token of an id; None if it has none."""
        try:
            token = self.tokenizer.convert_ids_to_tokens(id_)
        except Exception:  # a tokenizer may raise anything for an unknown id
            return None
        return None if token is None else str(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text. special: with the tokens around it."""
        texts = {"text_target": text} if self.target else {"text": text}
        return list(self.tokenizer(**texts, add_special_tokens=special)["input_ids"])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int] | None]:
        """Return the ids of two texts with the tokens around and between them, and their types if it has any."""
        read = self.tokenizer(first, second)
        types = read.get("token_type_ids")
        return list(read["input_ids"]), None if types is None else list(types)

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of ids without special tokens; None if the tokenizer cannot write them."""
        try:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        except Exception:  # a tokenizer may raise anything for unknown ids
            return None

    @functools.cached_property
    def ids(self) -> list[int]:
        """The ids of text, sorted.

        Special tokens and single bytes are left out, and tokens that are read only at the beginning of a text, such as
        the code of a language.
        """
        special = {None, *map(str, self.tokenizer.all_special_tokens)}
        tokens = {i: str(token) for i in range(self.size) if (token := self.token(i)) not in special}
        if self.models:
            pieces = {p.piece for model in self.models for p in model.pieces}
            others = {t for t in tokens.values() if t not in pieces}
            with self.mode() as tokenizer:
                parts = {t: (tokenizer.tokenize(t), tokenizer.tokenize("a" + t)) for t in others}
            openers = {t for t, (alone, after) in parts.items() if alone == [t] and t not in after}
            tokens = {i: t for i, t in tokens.items() if t not in openers and not _BYTE.fullmatch(t)}
        return sorted(tokens)

    def around(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that it puts before and after a text."""
        whole, inner = self.encode(text), self.encode(text, special=False)
        at = next(i for i in range(len(whole) + 1) if whole[i : i + len(inner)] == inner)
        return whole[:at], whole[at + len(inner) :]

    def between(self, first: str, second: str) -> tuple[list[int], list[int], list[int], list[int] | None]:
        """Return the ids that it puts before, between and after two texts, and the types of all ids."""
        whole, types = self.encode_pair(first, second)
        one, other = self.encode(first, special=False), self.encode(second, special=False)
        at = next(i for i in range(len(whole) + 1) if whole[i : i + len(one)] == one)
        end = at + len(one)
        then = next(i for i in range(end, len(whole) + 1) if whole[i : i + len(other)] == other)
        return whole[:at], whole[end:then], whole[then + len(other) :], types

    @property
    def can_read(self) -> bool:
        """Whether it can read texts. Some tokenizers need a target language first."""
        try:
            self.encode("a")
        except Exception:  # such a tokenizer may raise anything
            return False
        return True

    @contextmanager
    def mode(self) -> Iterator[Any]:
        """Switch the tokenizer to this language for a while. A call of the tokenizer ends the mode."""
        switch = getattr(self.tokenizer, "_switch_to_target_mode", None)
        if not self.target or switch is None or not self.can_read:
            yield self.tokenizer
            return
        switch()
        try:
            yield self.tokenizer
        finally:
            self.tokenizer._switch_to_input_mode()
