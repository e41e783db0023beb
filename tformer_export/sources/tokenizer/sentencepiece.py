"""A tokenizer built on SentencePiece models, whatever it does with their ids → tokenizers' models.

Which id a piece has is asked of the original. The vocabulary of the original may hold tokens that the SentencePiece
model does not make of any text (pieces of the other language, control symbols): they are kept to be written, and hidden
from reading behind a character that no text has. And it may lack pieces that the model makes: these get ids beyond the
vocabulary, which a runtime refuses as unknown.

Characters that the model does not know, it leaves together, and the original looks them up in its vocabulary. So does
the form made here, but what it does not find as a whole it looks up in parts: it knows some texts that the original
does not, and reads all that the original knows as that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tformer_export.sources.tokenizer.reference import Form, Original

SPACE = "▁"
_HIDDEN, _ABSENT = "\U0010ffff", "\U0010fffe"  # no characters: the first marks what is hidden, the second replaces it
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # types of pieces
_WORSE = 100.0  # than any piece: what no piece is a part of
_UNIGRAM, _BPE = 1, 2  # types of models


def from_pieces(original: Original) -> Iterator[Form]:
    """Candidates for every SentencePiece model that the tokenizer holds."""
    for model in original.models:
        form = _model(original, model)
        if form is None:
            continue
        made = form.tokenizer
        for prefixed in ("every part", "the text"):  # of a text that added tokens divide
            made.normalizer = _normalizer(model.normalizer_spec, prefixed == "every part")
            if prefixed == "the text":
                made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
            for decoder in _decoders(model.trainer_spec.byte_fallback):
                made.decoder = decoder
                yield Form(Tokenizer.from_str(made.to_str()), form.unknowns)
            if not model.normalizer_spec.add_dummy_prefix:
                break


def _decoders(has_bytes: bool) -> Iterator[decoders.Decoder]:
    """From pieces to text: with bytes joined to characters or not, and with spaces at the ends of the text or not."""
    for ends in (r"\A ", r"\A +", r"\A +| +\z", None):
        strip = [] if ends is None else [decoders.Replace(Regex(ends), "")]
        for joined in ([decoders.ByteFallback()], []) if has_bytes else ([],):
            steps = [decoders.Replace(_HIDDEN, ""), decoders.Replace(SPACE, " "), *joined, decoders.Fuse(), *strip]
            yield decoders.Sequence(steps)


def _model(original: Original, proto: Any) -> Form | None:
    """The vocabulary and how it is applied, without what happens to spaces."""
    pieces = {p.piece: p for p in proto.pieces}
    readable = {text for text, p in pieces.items() if p.type in (_NORMAL, _USER_DEFINED, _BYTE)}
    controls = {text for text, p in pieces.items() if p.type == _CONTROL}
    given = {str(token): token for token in original.tokenizer.added_tokens_decoder.values()}
    whole = {*given, *map(str, original.tokenizer.all_special_tokens)}
    with original.mode() as tokenizer:
        ids = {text: int(tokenizer.convert_tokens_to_ids(text)) for text in readable | whole}
        written = {i: original.token(i) for i in range(original.size)}
        others = {text: i for i, text in written.items() if text is not None and text not in ids}
        others = {text: i for text, i in others.items() if tokenizer.convert_tokens_to_ids(text) == i}
        openers = {text: i for text, i in others.items() if tokenizer.tokenize(text) == [text]}
    if proto.trainer_spec.model_type == _BPE:
        whole |= {text for text in readable if pieces[text].type == _USER_DEFINED}
    whole |= {*openers}
    lacking = sorted(text for text in readable - whole if ids[text] == original.unknown)
    alphabet = set("".join(readable - {text for text in readable if pieces[text].type == _BYTE})) | {SPACE}
    foreign = {text: i for text, i in others.items() if text not in controls | whole and not alphabet & set(text)}
    if proto.trainer_spec.model_type == _BPE:
        foreign = {}
    ids |= openers | foreign
    read = {i: text for text, i in ids.items() if i != original.unknown or text in whole}
    vocabulary = [read.get(i, _HIDDEN + (written[i] or str(i))) for i in range(original.size)]
    made = _applied(proto, vocabulary + lacking, pieces, original.unknown, set(foreign))
    if made is None:
        return None
    made.add_tokens(
        [added_token(t, i in original.special, given.get(t)) for i, t in sorted(read.items()) if t in whole]
    )
    unread = [i for i in range(original.size) if i not in read and written[i] in controls]
    made.add_tokens([added_token(vocabulary[i], special=True) for i in unread if not original.decode([i])])
    beyond = range(original.size, original.size + len(lacking))
    return Form(made, frozenset({*foreign.values(), *beyond}))


def added_token(text: str, special: bool, like: AddedToken | None = None) -> AddedToken:
    """A token that is found in a text as a whole, before SentencePiece sees the rest."""
    if like is None:
        return AddedToken(text, special=special, normalized=False)
    sides = {"lstrip": like.lstrip, "rstrip": like.rstrip, "single_word": like.single_word}
    return AddedToken(text, special=special, normalized=False, **sides)


def _applied(
    proto: Any, vocabulary: list[str], pieces: dict[str, Any], unknown: int | None, foreign: set[str]
) -> Tokenizer | None:
    bytes_ = proto.trainer_spec.byte_fallback
    best = max((p.score for p in pieces.values() if p.type == _NORMAL), default=0.0)
    scores = {text: p.score for text, p in pieces.items()}
    scores |= {t: len(t) * best - 0.1 for t, p in pieces.items() if p.type == _USER_DEFINED}  # so that it always wins
    scores |= dict.fromkeys(foreign, min(scores.values()) - _WORSE)
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
