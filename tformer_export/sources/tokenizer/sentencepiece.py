"""Conversion of a tokenizer that is built on SentencePiece models.

The ids of pieces come from the original. Its vocabulary may hold tokens that the SentencePiece model makes of no text,
such as pieces of the other language and control symbols. They can be written, but a character that no text has hides
them from reading. The vocabulary may also lack pieces that the model makes. These get ids beyond the vocabulary, which
a runtime refuses as unknown.

A SentencePiece model leaves unknown characters together, and the original looks them up in its vocabulary. The
conversion does the same, and looks up the parts of a text that it does not find as a whole. So it reads all texts that
the original knows in the same way, and knows some more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tformer_export.sources.tokenizer.reference import CandidateTokenizer, ReferenceTokenizer

SPACE = "▁"
_HIDDEN, _ABSENT = (
    "\U0010ffff",
    "\U0010fffe",
)  # noncharacters: the first marks hidden tokens, the second replaces it in texts
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # types of pieces
_FOREIGN_PENALTY = 100.0  # subtracted from the least score, so that any other piece wins
_UNIGRAM, _BPE = 1, 2  # types of models


def from_sentencepiece(original: ReferenceTokenizer) -> Iterator[CandidateTokenizer]:
    """Yield candidates for every SentencePiece model that the tokenizer holds."""
    for model in original.models:
        form = _make_candidate(original, model)
        if form is None:
            continue
        tokenizer = form.tokenizer
        for prefixed in ("every part", "the text"):  # added tokens divide a text into parts
            tokenizer.normalizer = _normalizer(model.normalizer_spec, prefixed == "every part")
            if prefixed == "the text":
                tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
            for decoder in _decoders(model.trainer_spec.byte_fallback):
                tokenizer.decoder = decoder
                yield CandidateTokenizer(Tokenizer.from_str(tokenizer.to_str()), form.unknowns)
            if not model.normalizer_spec.add_dummy_prefix:
                break


def _decoders(has_bytes: bool) -> Iterator[decoders.Decoder]:
    """Yield decoders from pieces to text: with and without byte fallback, with and without spaces at the ends."""
    for ends in (r"\A ", r"\A +", r"\A +| +\z", None):
        strip = [] if ends is None else [decoders.Replace(Regex(ends), "")]
        for joined in ([decoders.ByteFallback()], []) if has_bytes else ([],):
            steps = [decoders.Replace(_HIDDEN, ""), decoders.Replace(SPACE, " "), *joined, decoders.Fuse(), *strip]
            yield decoders.Sequence(steps)


def _make_candidate(original: ReferenceTokenizer, proto: Any) -> CandidateTokenizer | None:
    """Make a candidate without normalizer, pre-tokenizer and decoder; None for a model that is not supported."""
    is_bpe = proto.trainer_spec.model_type == _BPE
    pieces = {p.piece: p for p in proto.pieces}
    readable = _texts(proto, _NORMAL, _USER_DEFINED, _BYTE)
    controls = _texts(proto, _CONTROL)
    added_tokens = {str(token): token for token in original.tokenizer.added_tokens_decoder.values()}
    whole = {*added_tokens, *map(str, original.tokenizer.all_special_tokens)}
    entries = _read_vocabulary(original, readable | whole)
    whole |= {*entries.openers, *(_texts(proto, _USER_DEFINED) if is_bpe else ())}
    missing = sorted(text for text in readable - whole if entries.ids[text] == original.unknown)
    alphabet = set("".join(_texts(proto, _NORMAL, _USER_DEFINED))) | {SPACE}
    foreign = {} if is_bpe else _foreign(entries.others, alphabet, controls | whole)
    ids = entries.ids | entries.openers | foreign
    read = {i: text for text, i in ids.items() if i != original.unknown or text in whole}
    vocabulary = [read.get(i, _HIDDEN + (entries.written[i] or str(i))) for i in range(original.size)]
    applied = _make_tokenizer(proto, vocabulary + missing, pieces, original.unknown, set(foreign))
    if applied is None:
        return None
    applied.add_tokens(
        [added_token(t, i in original.special, added_tokens.get(t)) for i, t in sorted(read.items()) if t in whole]
    )
    unread = [i for i in range(original.size) if i not in read and entries.written[i] in controls]
    applied.add_tokens([added_token(vocabulary[i], special=True) for i in unread if not original.decode([i])])
    beyond = range(original.size, original.size + len(missing))
    return CandidateTokenizer(applied, frozenset({*foreign.values(), *beyond}))


def _texts(proto: Any, *types: int) -> set[str]:
    """Return the texts of the pieces of these types."""
    return {p.piece for p in proto.pieces if p.type in types}


@dataclass(frozen=True)
class _Entries:
    """The entries of the vocabulary of the original.

    ids: of the texts that its model reads or that it finds as a whole.
    written: id → its text.
    others: other text → its id. openers: those of `others` that the original reads as one token.
    """

    ids: dict[str, int]
    written: dict[int, str | None]
    others: dict[str, int]
    openers: dict[str, int]


def _read_vocabulary(original: ReferenceTokenizer, texts: set[str]) -> _Entries:
    with original.mode() as tokenizer:
        ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in texts}
        written = {i: original.token(i) for i in range(original.size)}
        others = {text: i for i, text in written.items() if text is not None and text not in ids}
        others = {text: i for text, i in others.items() if tokenizer.convert_tokens_to_ids(text) == i}
        openers = {text: i for text, i in others.items() if tokenizer.tokenize(text) == [text]}
    return _Entries(ids, written, others, openers)


def _foreign(others: dict[str, int], alphabet: set[str], known: set[str]) -> dict[str, int]:
    """Return the entries that the original looks up, because its model knows none of their characters."""
    return {text: i for text, i in others.items() if text not in known and not alphabet & set(text)}


def added_token(text: str, special: bool, like: AddedToken | None = None) -> AddedToken:
    """Make a token that is found in a text as a whole, before SentencePiece reads the rest."""
    if like is None:
        return AddedToken(text, special=special, normalized=False)
    sides = {"lstrip": like.lstrip, "rstrip": like.rstrip, "single_word": like.single_word}
    return AddedToken(text, special=special, normalized=False, **sides)


def _make_tokenizer(
    proto: Any, vocabulary: list[str], pieces: dict[str, Any], unknown: int | None, foreign: set[str]
) -> Tokenizer | None:
    bytes_ = proto.trainer_spec.byte_fallback
    best = max((p.score for p in pieces.values() if p.type == _NORMAL), default=0.0)
    scores = {text: p.score for text, p in pieces.items()}
    scores |= {
        t: len(t) * best - 0.1 for t, p in pieces.items() if p.type == _USER_DEFINED
    }  # so that such a piece always wins
    scores |= dict.fromkeys(foreign, min(scores.values()) - _FOREIGN_PENALTY)
    if proto.trainer_spec.model_type == _UNIGRAM and unknown is not None:
        scored = [(text, scores.get(text, 0.0)) for text in vocabulary]
        return Tokenizer(models.Unigram(scored, unknown, bytes_))
    if proto.trainer_spec.model_type == _BPE:
        known = set(vocabulary)
        merged = sorted(
            (p for p in proto.pieces if p.type == _NORMAL and len(p.piece) > 1 and p.piece in known),
            key=lambda p: -p.score,
        )
        merges = [
            (left, right)
            for p in merged
            for left, right in ((p.piece[:i], p.piece[i:]) for i in range(1, len(p.piece)))
            if left in known and right in known
        ]
        return Tokenizer(
            models.BPE(
                vocab={text: i for i, text in enumerate(vocabulary)},
                merges=merges,
                unk_token=None if unknown is None else vocabulary[unknown],
                fuse_unk=True,
                byte_fallback=bytes_,
            )
        )
    return None


def _normalizer(spec: Any, prefix: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Replace(_HIDDEN, _ABSENT)]
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and prefix:
        steps.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)
