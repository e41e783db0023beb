"""Whether a tokenizer reads and writes what the original does: on texts, and on ids drawn from the vocabulary."""

from __future__ import annotations

import random

from tformer_export.sources.tokenizer.reference import Form, Original

SAMPLE = (
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
PAIRS = ((SAMPLE[0], SAMPLE[1]), (SAMPLE[8], SAMPLE[14]), (SAMPLE[14], SAMPLE[6]))
SEQUENCES, LENGTH = 24, 10  # of ids drawn
SPECIAL = 8  # special tokens that are looked for in a text


def difference(original: Original, form: Form, reads: bool, writes: bool, pairs: bool = False) -> str | None:
    """The first text or ids on which the two differ, in words; None if they agree. pairs: of two texts, too."""
    draw = random.Random(0)
    drawn = [draw.choices(original.ids, k=LENGTH) for _ in range(SEQUENCES)]
    names = [str(token) for token in original.tokenizer.all_special_tokens[:SPECIAL]]
    texts = [*SAMPLE, *(f"one {name} two{name}three" for name in names), *filter(None, map(original.decode, drawn))]
    read = [original.encode(text) for text in texts] if original.can_read else []
    if reads:
        for text, expected in zip(texts, read, strict=True):
            found = form.tokenizer.encode(text).ids
            if not _same(found, expected, original.unknown, form.unknowns):
                return f"it would read {text!r} as {_shown(found)}, not {_shown(expected)}"
    if pairs:
        for pair in PAIRS:
            ids, types = original.encode_pair(*pair)
            encoding = form.tokenizer.encode(*pair)
            if not _same(encoding.ids, ids, original.unknown, form.unknowns):
                return f"it would read the pair {pair} as {_shown(encoding.ids)}, not {_shown(ids)}"
            if types is not None and len(ids) == len(encoding.ids) and types != encoding.type_ids:
                return f"it would read the pair {pair} with the types {_shown(encoding.type_ids)}, not {_shown(types)}"
    if writes:
        for row in (*read, *drawn):
            expected_text, found_text = original.decode(row), form.tokenizer.decode(row, skip_special_tokens=True)
            if found_text != expected_text:
                return f"it would write {found_text!r} for {_shown(row)}, not {expected_text!r}"
    return None


def _same(found: list[int], expected: list[int], unknown: int | None, unknowns: frozenset[int]) -> bool:
    """Whether the ids are equal, where one unknown of the original may be several of `unknowns`."""
    ends = {0}  # how many of `found` may have been read
    for id_ in expected:
        after = {at + 1 for at in ends if at < len(found) and found[at] == id_}
        if id_ == unknown:
            for at in ends:
                for end in range(at, len(found)):
                    if found[end] not in unknowns and found[end] != unknown:
                        break
                    after.add(end + 1)
        ends = after
    return len(found) in ends


def _shown(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:16]))}{', …' if len(ids) > 16 else ''}]"
