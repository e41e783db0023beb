"""Ids, words and places of tokens, as the tokenizers library has them, for tokenizers of several kinds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from golden_file import GoldenFile
from text_codecs import TEXTS, around, tokenizers, train
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tformer_runtime.preprocess.text_reader import TextReader, TextWindow

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# Letters, accents as letters and as marks, wide and joined characters, controls, spaces and letters of no vocabulary.
ALPHABET = [
    *"abcdeht ,.'!-3AEΣςİßéüñÅﬁⅷ①Ⅻ日本語한국각ไทย",
    *"\u0301\u0308\u0323\u0327\u3099\u200d\u200b\u00ad\ufeff\u00a0\u2003\u3000\t\n\r\x00\x07\x85",
    "e\u0301", "o\u0323\u0302", "a\u0308\u0323", "\u1112\u1161\u11ab", "👩\u200d👩\u200d👧", "🇩🇪", "😀", "☃", "𝔘", "𠀀",
    "\U0002f81a",
    "が", "か\u3099", "ǆ", "ŉ", "½", "²", "٣", "_", "~", "▁", "Ġ", "the ", " the", "  ", "film ", "naïve",
]  # fmt: skip


def byte_level(prefix: bool, trims: bool, roberta: bool, **parts: Any) -> Tokenizer:
    tokenizer = train(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix),
        decoder=decoders.ByteLevel(),
        **parts,
    )
    if roberta:
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 1), trim_offsets=trims, add_prefix_space=prefix
        )
    else:
        template = around(tokenizer, "<s>", "</s>").post_processor
        trimming = processors.ByteLevel(trim_offsets=trims, add_prefix_space=prefix)
        tokenizer.post_processor = processors.Sequence([trimming, template])
    return tokenizer


def word_piece(**options: Any) -> Tokenizer:
    tokenizer = train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        normalizer=normalizers.BertNormalizer(**options),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    return around(tokenizer, "[CLS]", "[SEP]")


def unigram(scheme: str, *steps: Any, split: bool = True) -> Tokenizer:
    tokenizer = train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=260, special_tokens=SPECIAL, unk_token="<unk>"),
        normalizer=normalizers.Sequence(list(steps)),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split),
    )
    return around(tokenizer, "<s>", "</s>")


def letters(*steps: Any, pre: Any = None) -> Tokenizer:
    """Return a tokenizer of single letters, whose tokens show each place."""
    alphabet = [chr(i) for i in range(0x20, 0x250)]
    model = models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    return around(tokenizer, "<s>", "</s>")


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("film", single_word=True), AddedToken("thé", rstrip=True), "HE"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def all_tokenizers() -> dict[str, Tokenizer]:
    pattern = Regex(r"(?i:'s|'t)|\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s+")
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    split_bytes = byte_level(False, True, False)
    split_bytes.pre_tokenizer = split
    digits = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)])
    return {
        **tokenizers(),
        "roberta": byte_level(True, True, True),
        "roberta without trimming": byte_level(False, False, True),
        "byte level that trims": byte_level(False, True, False, normalizer=normalizers.NFC()),
        "patterns, then bytes": split_bytes,
        "cased word piece": word_piece(lowercase=False),
        "word piece with accents": word_piece(strip_accents=False, handle_chinese_chars=False),
        "word piece of raw text": word_piece(clean_text=False),
        "unigram, first": unigram("first", normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()),
        "unigram, never, one word": unigram(
            "never", normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFC(), split=False
        ),
        "letters": letters(),
        "composed letters": letters(normalizers.NFC()),
        "decomposed letters": letters(normalizers.NFD()),
        "compatible letters": letters(normalizers.NFKC(), pre=pre_tokenizers.Whitespace()),
        "stripped letters": letters(
            normalizers.Strip(), normalizers.Lowercase(), normalizers.Prepend("__"), pre=pre_tokenizers.Punctuation()
        ),
        "replaced letters": letters(normalizers.Replace("the", "xy"), normalizers.Replace("e", ""), pre=digits),
        "added tokens": with_added(byte_level(True, True, True)),
        "added tokens of word pieces": with_added(word_piece()),
    }


def plain(window: TextWindow) -> dict[str, Any]:
    return {
        "ids": window.ids.tolist(),
        "types": window.types.tolist(),
        "offsets": window.offsets.tolist(),
        "words": window.words.tolist(),
        "texts": window.texts.tolist(),
        "inText": window.in_text.tolist(),
    }


def main() -> None:
    rng = np.random.default_rng(17)
    random_texts = ["".join(rng.choice(ALPHABET, int(n))) for n in rng.integers(1, 30, 150)]
    added = ["a film, films <mask>thé  x", "  <mask> <mask>", "HEthé the film"]
    cases = []
    for name, tokenizer in all_tokenizers().items():
        definition = tokenizer.to_str()
        reader = TextReader(definition)
        texts = [text for text in [*TEXTS, *added, *random_texts] if "\x00" not in text or "letters" not in name]
        pairs = [(texts[i], texts[-1 - i] * 3) for i in range(20)]
        long = [" ".join(texts[i : i + 3]) for i in range(0, 30, 3)]
        cases.append(
            {
                "name": name,
                "definition": definition,
                "marksSubwords": reader.marks_subwords,
                "whole": [[text, plain(reader.window(text))] for text in texts],
                "cut": [[text, plain(reader.window(text, 7))] for text in texts[:20]],
                "windows": [
                    [text, size, stride, [plain(window) for window in reader.windows(text, size, stride)]]
                    # Without a post-processor the library forgets the text of a pair's tokens in later windows.
                    for text in [*long, *(pairs if tokenizer.post_processor else [])]
                    for size, stride in ((9, 0), (12, 3), (20, 40))
                    if reader.room(size, "" if isinstance(text, str) else (text[0], "")) > 0
                ],
            }
        )
    GoldenFile().write(json.loads(json.dumps(cases)))


main()
