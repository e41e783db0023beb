"""Candidate conversions of a transformers tokenizer to tokenizers' JSON:

- its own backend, if it has one;
- the result of transformers' own converter;
- the SentencePiece models that it holds (`sentencepiece`), with its ids;
- bytes, if every text has as many tokens as bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tformer_export.sources.tokenizer.check import SAMPLE_TEXTS
from tformer_export.sources.tokenizer.reference import CandidateTokenizer, ReferenceTokenizer
from tformer_export.sources.tokenizer.sentencepiece import added_token, from_sentencepiece

_CLEANED_UP = (
    " .",
    " ?",
    " !",
    " ,",
    " ' ",
    " n't",
    " 'm",
    " 's",
    " 've",
    " 're",
)  # texts from which transformers removes spaces


def candidate_tokenizers(original: ReferenceTokenizer) -> Iterator[CandidateTokenizer]:
    """Yield candidates, the most faithful first. Each is made only when it is needed."""
    for form in _plain_candidates(original):
        yield form
        if getattr(original.tokenizer, "clean_up_tokenization_spaces", False):
            yield CandidateTokenizer(_with_cleanup(form.tokenizer), form.unknowns)


def _plain_candidates(original: ReferenceTokenizer) -> Iterator[CandidateTokenizer]:
    with original.mode() as tokenizer:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if isinstance(backend, Tokenizer) else None
    if text is not None:
        yield CandidateTokenizer(Tokenizer.from_str(text))
        return
    converted = _converted(original)
    if converted is not None:
        yield CandidateTokenizer(converted)
    for form in from_sentencepiece(original):
        yield CandidateTokenizer(_with_template(original, form.tokenizer), form.unknowns)
    for candidate in _byte_level(original):
        yield CandidateTokenizer(_with_template(original, candidate))


def _converted(original: ReferenceTokenizer) -> Tokenizer | None:
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    try:
        converted: Tokenizer = convert_slow_tokenizer(original.tokenizer)
    except Exception:  # there is no converter for this class or variant
        return None
    return converted


def _with_template(original: ReferenceTokenizer, tokenizer: Tokenizer) -> Tokenizer:
    """Add the tokens that the original puts around a text."""
    before, after = original.around(SAMPLE_TEXTS[0]) if original.can_read else ([], [])
    if before or after:
        template = [*(f"token{i}" for i in before), "$A", *(f"token{i}" for i in after)]
        pair, used = _pair_template(original)
        special = [
            {"id": f"token{i}", "ids": [i], "tokens": [tokenizer.id_to_token(i)]}
            for i in dict.fromkeys((*before, *after, *used))
        ]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=special)
    return tokenizer


def _pair_template(original: ReferenceTokenizer) -> tuple[list[str], list[int]]:
    """Return the template of a pair of texts with token types, and the ids that the original adds to a pair."""
    try:
        before, middle, after, types = original.between(SAMPLE_TEXTS[0], SAMPLE_TEXTS[1])
    except Exception:  # the tokenizer reads no pairs, or joins them in another way
        return ["$A:0", "$B:1"], []
    first = len(original.encode(SAMPLE_TEXTS[0], special=False))
    ends = [len(before), len(before) + first, len(before) + first + len(middle)]
    types = types or [0] * (ends[2] + len(original.encode(SAMPLE_TEXTS[1], special=False)) + len(after))
    tokens = [f"token{i}:{types[at]}" for at, i in enumerate(before)]
    tokens.append(f"$A:{types[ends[0]]}")
    tokens += [f"token{i}:{types[ends[1] + at]}" for at, i in enumerate(middle)]
    tokens.append(f"$B:{types[ends[2]]}")
    tokens += [f"token{i}:{types[at - len(after)]}" for at, i in enumerate(after)]
    return tokens, [*before, *middle, *after]


def _with_cleanup(tokenizer: Tokenizer) -> Tokenizer:
    """Add transformers' removal of spaces to the decoder."""
    tidied = Tokenizer.from_str(tokenizer.to_str())
    before = [] if tidied.decoder is None else [tidied.decoder]
    tidied.decoder = decoders.Sequence(
        [*before, decoders.Fuse(), *(decoders.Replace(text, text.strip()) for text in _CLEANED_UP)]
    )
    return tidied


def _byte_level(original: ReferenceTokenizer) -> Iterator[Tokenizer]:
    """Yield tokenizers whose tokens are the bytes of UTF-8, with the ids of the original."""
    places: dict[int, tuple[str, int]] = {}  # byte → a character with it, and its index there; some bytes occur in none
    for text in map(chr, (*range(0x800), *range(0x800, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000))):
        for at, byte in enumerate(text.encode()):
            places.setdefault(byte, (text, at))
    ids = {text: original.encode(text, special=False) for text, _ in places.values()} if original.can_read else {}
    if not ids or any(len(text_ids) != len(text.encode()) for text, text_ids in ids.items()):
        return
    letters = _byte_letters()
    vocabulary = {letters[byte]: ids[text][at] for byte, (text, at) in places.items()}
    added_tokens = original.tokenizer.added_tokens_decoder
    added = {int(i): str(token) for i, token in added_tokens.items()}
    rest = sorted(set(range(original.size)) - set(vocabulary.values()) - set(added))
    vocabulary |= dict(zip([letter for letter in letters if letter not in vocabulary], rest, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **{text: i for i, text in added.items()}}, merges=[]))
    tokenizer.add_tokens([added_token(t, i in original.special, added_tokens[i]) for i, t in sorted(added.items())])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for last in ([], [decoders.Replace("\N{REPLACEMENT CHARACTER}", "")]):  # invalid UTF-8 is shown, or left out
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *last])
        yield Tokenizer.from_str(tokenizer.to_str())


def _byte_letters() -> list[str]:
    """Return the letter of each byte in tokenizers' byte-level form: the byte itself if it is printable."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(byte if byte in seen else next(spare)) for byte in range(256)]
