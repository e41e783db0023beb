"""Whether a tokenizer reads and writes what the original does: on texts, and on ids drawn from the vocabulary."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from tformer_export.source.tokenizer.original import Original

SAMPLE = (
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "UPPER CASE, Mixed Case and lower case!",
    " leading and trailing spaces ",
    "double  spaces   and\ttabs\nand lines",
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
SEQUENCES, LENGTH = 24, 10  # of ids drawn
SPECIAL = 8  # special tokens that are looked for in a text


def difference(original: Original, made: Tokenizer, reads: bool, writes: bool) -> str | None:
    """The first text or ids on which the two differ, in words; None if they agree.

    Ids beyond the original's stand for pieces that it does not know.
    """
    draw = random.Random(0)
    drawn = [draw.choices(original.ids, k=LENGTH) for _ in range(SEQUENCES)]
    names = [str(token) for token in original.tokenizer.all_special_tokens[:SPECIAL]]
    texts = [*SAMPLE, *(f"one {name} two{name}three" for name in names), *map(original.decode, drawn)]
    read = [original.encode(text) for text in texts] if original.can_read else []
    if reads:
        for text, expected in zip(texts, read, strict=True):
            found = [i if i < original.size else original.unknown for i in made.encode(text).ids]
            if found != expected:
                return f"it would read {text!r} as {_shown(found)}, not {_shown(expected)}"
    if writes:
        for row in (*read, *drawn):
            expected_text, found_text = original.decode(row), made.decode(row, skip_special_tokens=True)
            if found_text != expected_text:
                return f"it would write {found_text!r} for {_shown(row)}, not {expected_text!r}"
    return None


def _shown(ids: list[int] | list[int | None]) -> str:
    return f"[{', '.join(map(str, ids[:16]))}{', …' if len(ids) > 16 else ''}]"
