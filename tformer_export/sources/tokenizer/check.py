"""Comparison of a tokenizer with the original, on texts and on ids drawn from the vocabulary."""

from __future__ import annotations

import random

from tformer_export.sources.tokenizer.reference import CandidateTokenizer, ReferenceTokenizer

SAMPLE_TEXTS = (
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "UPPER CASE, Mixed Case and lower case!",
    " leading and trailing spaces ",
    "double  spaces   and \t tabs\t, \n and\nlines\n\n",
    "In 2024, 3.14159 × 1,000,000 = 50% of $6,283,180.00?",
    "don't can't I'm we've they're 'quoted' \"quoted\" (bracketed) [x] {y} <z> a_b-c/d\\e",
    "e-mail: someone@example.org, https://example.org/?q=1&r=2#top",
    "Größe, naïve café, señor, œuvre, Łódź, Ærø, İstanbul",
    "Съешь же ещё этих мягких французских булок",
    "Ζαφείρι δέξου πάγκαλο, βαθῶν ψυχῆς τὸ σῆμα",
    "我能吞下玻璃而不伤身体。 日本語のテキスト、ひらがなとカタカナ。 한국어 텍스트",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "👋🏽 emoji 😀😀 👨‍👩‍👧 and ﬁ ligatures, ½, ①, Ａ，full width　space",
    "a",
    "…",
    "word" * 12,
)
SAMPLE_PAIRS = (
    (SAMPLE_TEXTS[0], SAMPLE_TEXTS[1]),
    (SAMPLE_TEXTS[8], SAMPLE_TEXTS[14]),
    (SAMPLE_TEXTS[14], SAMPLE_TEXTS[6]),
)
DRAWN_SEQUENCES, DRAWN_IDS = 24, 10  # drawn from the vocabulary
MAX_SPECIAL_TOKENS = 8  # special tokens that are put into a text


def find_difference(
    original: ReferenceTokenizer, form: CandidateTokenizer, reads: bool, writes: bool, pairs: bool = False
) -> str | None:
    """Describe the first text or ids on which the tokenizers differ; None if they agree.

    reads: compare the ids of texts. writes: compare the texts of ids. pairs: compare the ids of pairs of texts.
    """
    draw = random.Random(0)
    drawn = [draw.choices(original.ids, k=DRAWN_IDS) for _ in range(DRAWN_SEQUENCES)]
    names = [str(token) for token in original.tokenizer.all_special_tokens[:MAX_SPECIAL_TOKENS]]
    texts = [
        *SAMPLE_TEXTS,
        *(f"one {name} two{name}three" for name in names),
        *filter(None, map(original.decode, drawn)),
    ]
    read = [original.encode(text) for text in texts] if original.can_read else []
    if reads:
        for text, expected in zip(texts, read, strict=True):
            found = form.tokenizer.encode(text).ids
            if not _same(found, expected, original.unknown, form.unknowns):
                return f"it would read {text!r} as {_quoted(found)}, not {_quoted(expected)}"
    if pairs:
        for pair in SAMPLE_PAIRS:
            ids, types = original.encode_pair(*pair)
            encoding = form.tokenizer.encode(*pair)
            if not _same(encoding.ids, ids, original.unknown, form.unknowns):
                return f"it would read the pair {pair} as {_quoted(encoding.ids)}, not {_quoted(ids)}"
            if types is not None and len(ids) == len(encoding.ids) and types != encoding.type_ids:
                return (
                    f"it would read the pair {pair} with the types {_quoted(encoding.type_ids)}, not {_quoted(types)}"
                )
    if writes:
        for row in (*read, *drawn):
            expected_text, found_text = original.decode(row), form.tokenizer.decode(row, skip_special_tokens=True)
            if found_text != expected_text:
                return f"it would write {found_text!r} for {_quoted(row)}, not {expected_text!r}"
    return None


def _same(ids: list[int], expected: list[int], unknown: int | None, unknowns: frozenset[int]) -> bool:
    """Return whether the ids are equal, where one unknown id of the original may stand for several of `unknowns`."""
    ends = {0}  # numbers of `ids` that may match the expected ids so far
    for id_ in expected:
        after = {at + 1 for at in ends if at < len(ids) and ids[at] == id_}
        if id_ == unknown:
            for at in ends:
                for end in range(at, len(ids)):
                    if ids[end] not in unknowns and ids[end] != unknown:
                        break
                    after.add(end + 1)
        ends = after
    return len(ids) in ends


def _quoted(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:16]))}{', …' if len(ids) > 16 else ''}]"
