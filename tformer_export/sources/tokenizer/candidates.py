"""Forms that a transformers tokenizer may have in tokenizers' JSON, to be checked:

- its own backend, if it has one;
- what transformers' own converter makes;
- the SentencePiece models that it holds (`pieces`), with its ids;
- bytes, if every text is as many tokens as it has bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tformer_export.sources.tokenizer.check import SAMPLE
from tformer_export.sources.tokenizer.reference import Form, Original
from tformer_export.sources.tokenizer.sentencepiece import added_token, from_pieces

_TIDY = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # what transformers takes spaces from


def forms(original: Original) -> Iterator[Form]:
    """Candidates, the most faithful first; each is made when it is asked for."""
    for form in _plain_forms(original):
        yield form
        if getattr(original.tokenizer, "clean_up_tokenization_spaces", False):
            yield Form(_tidy(form.tokenizer), form.unknowns)


def _plain_forms(original: Original) -> Iterator[Form]:
    with original.mode() as tokenizer:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if isinstance(backend, Tokenizer) else None
    if text is not None:
        yield Form(Tokenizer.from_str(text))
        return
    converted = _converted(original)
    if converted is not None:
        yield Form(converted)
    for form in from_pieces(original):
        yield Form(_with_template(original, form.tokenizer), form.unknowns)
    for made in _from_bytes(original):
        yield Form(_with_template(original, made))


def _converted(original: Original) -> Tokenizer | None:
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    try:
        made: Tokenizer = convert_slow_tokenizer(original.tokenizer)
    except Exception:  # there is no converter for this one, or it does not know this variant
        return None
    return made


def _with_template(original: Original, made: Tokenizer) -> Tokenizer:
    """With the tokens that the original puts around a text."""
    before, after = original.around(SAMPLE[0]) if original.can_read else ([], [])
    if before or after:
        template = [*(f"token{i}" for i in before), "$A", *(f"token{i}" for i in after)]
        pair, used = _pair_template(original)
        special = [
            {"id": f"token{i}", "ids": [i], "tokens": [made.id_to_token(i)]}
            for i in dict.fromkeys((*before, *after, *used))
        ]
        made.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=special)
    return made


def _pair_template(original: Original) -> tuple[list[str], list[int]]:
    """What the original puts around and between two texts, with the type of each, and the ids of that."""
    try:
        before, middle, after, types = original.between(SAMPLE[0], SAMPLE[1])
    except Exception:  # of a tokenizer that reads no pairs, or not one text after the other
        return ["$A:0", "$B:1"], []
    first = len(original.encode(SAMPLE[0], special=False))
    ends = [len(before), len(before) + first, len(before) + first + len(middle)]
    types = types or [0] * (ends[2] + len(original.encode(SAMPLE[1], special=False)) + len(after))
    tokens = [f"token{i}:{types[at]}" for at, i in enumerate(before)]
    tokens.append(f"$A:{types[ends[0]]}")
    tokens += [f"token{i}:{types[ends[1] + at]}" for at, i in enumerate(middle)]
    tokens.append(f"$B:{types[ends[2]]}")
    tokens += [f"token{i}:{types[at - len(after)]}" for at, i in enumerate(after)]
    return tokens, [*before, *middle, *after]


def _tidy(made: Tokenizer) -> Tokenizer:
    """With transformers' way of taking spaces out of what is written."""
    tidied = Tokenizer.from_str(made.to_str())
    before = [] if tidied.decoder is None else [tidied.decoder]
    tidied.decoder = decoders.Sequence(
        [*before, decoders.Fuse(), *(decoders.Replace(text, text.strip()) for text in _TIDY)]
    )
    return tidied


def _from_bytes(original: Original) -> Iterator[Tokenizer]:
    """A tokenizer whose tokens are the bytes of UTF-8, under its own ids."""
    places: dict[int, tuple[str, int]] = {}  # byte → a character that has it, and where; some bytes occur in none
    for text in map(chr, (*range(0x800), *range(0x800, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000))):
        for at, byte in enumerate(text.encode()):
            places.setdefault(byte, (text, at))
    ids = {text: original.encode(text, special=False) for text, _ in places.values()} if original.can_read else {}
    if not ids or any(len(found) != len(text.encode()) for text, found in ids.items()):
        return
    letters = _letters()
    vocabulary = {letters[byte]: ids[text][at] for byte, (text, at) in places.items()}
    given = original.tokenizer.added_tokens_decoder
    added = {int(i): str(token) for i, token in given.items()}
    rest = sorted(set(range(original.size)) - set(vocabulary.values()) - set(added))
    vocabulary |= dict(zip([letter for letter in letters if letter not in vocabulary], rest, strict=False))
    made = Tokenizer(models.BPE(vocab={**vocabulary, **{text: i for i, text in added.items()}}, merges=[]))
    made.add_tokens([added_token(t, i in original.special, given[i]) for i, t in sorted(added.items())])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for last in ([], [decoders.Replace("\N{REPLACEMENT CHARACTER}", "")]):  # what is no UTF-8 is shown, or left out
        made.decoder = decoders.Sequence([decoders.ByteLevel(), *last])
        yield Tokenizer.from_str(made.to_str())


def _letters() -> list[str]:
    """For each byte the letter that stands for it in tokenizers' byte-level form: itself if it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(byte if byte in seen else next(spare)) for byte in range(256)]
