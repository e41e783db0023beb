"""Ids, texts and pieces of texts of the Python runtime, for tokenizers of several kinds."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
from golden_file import GoldenFile
from msgspec.structs import astuple
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tformer_runtime.base.errors import InputError
from tformer_runtime.preprocess.text_reader import TextReader
from tformer_runtime.preprocess.tokenizer import Codec, Detokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein",
    "file not found: permission denied (errno 13)",
    "naïve café résumé, déjà vu!",
    "日本語のテキスト と 한국어 텍스트",
    "emoji 👩‍👩‍👧 and 🇩🇪 flags, é combining",
    "don't stop. it's 3.14, isn't it?",
    "a  b\tc\nd",
] * 3
TEXTS = [
    *CORPUS[:8],
    "",
    " leading and trailing ",
    "x",
    "unknown ☃ snowman",
    "ⅷ ﬁ",
    "HELLO World",
    "hello\u0301 world",
    "a" * 60,
]


def train(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def around(tokenizer: Tokenizer, first: str, last: str) -> Tokenizer:
    ids = [(token, tokenizer.token_to_id(token)) for token in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ids
    )
    return tokenizer


def tokenizers() -> dict[str, Tokenizer]:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    byte_level = train(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    fallback = train(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))]),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    word_piece = train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    unigram = train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=260, special_tokens=special, unk_token="<unk>"),
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )
    words = train(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(vocab_size=60, special_tokens=special),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )
    characters = train(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(vocab_size=80, special_tokens=special),
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.Split(Regex("."), "isolated"),
        decoder=decoders.Fuse(),
    )
    suffixed = train(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        trainers.BpeTrainer(vocab_size=200, special_tokens=special, end_of_word_suffix="</w>"),
        pre_tokenizer=pre_tokenizers.Whitespace(),
        decoder=decoders.BPEDecoder(),
    )
    return {
        "byte level": around(byte_level, "<s>", "</s>"),
        "byte fallback": around(fallback, "<s>", "</s>"),
        "word piece": around(word_piece, "[CLS]", "[SEP]"),
        "unigram": around(unigram, "<s>", "</s>"),
        "words": words,
        "characters": around(characters, "<s>", "</s>"),
        "suffixed": suffixed,
    }


def encoded(codec: Codec, text: str) -> Any:
    try:
        return {"ids": codec.encode(text, True), "plain": codec.encode(text, False)}
    except InputError as error:
        return {"error": str(error)}


def pieces(codec: Codec, ids: list[int], stop: list[str]) -> list[str]:
    text = Detokenizer(codec, stop)
    return [*(text.push(i) for i in ids), text.finish()]


def main() -> None:
    rng = np.random.default_rng(3)
    cases = []
    for name, tokenizer in tokenizers().items():
        definition = tokenizer.to_str()
        codec, reader = Codec(definition), TextReader(definition)
        random_ids = [rng.integers(0, codec.size, int(n)).tolist() for n in rng.integers(1, 24, 40)]
        random_ids += [reader.ids(text) for text in TEXTS if text]
        cases.append(
            {
                "name": name,
                "definition": definition,
                "size": codec.size,
                "encoded": [[text, encoded(codec, text)] for text in TEXTS],
                "read": [[text, *(a.tolist() for a in astuple(reader.read(text)))] for text in TEXTS],
                "pairs": [
                    [first, second, limit, *(a.tolist() for a in astuple(reader.read((first, second), limit)))]
                    for first, second in pairwise(TEXTS[:9])
                    for limit in (8, 9, 16, 40)
                ],
                "decoded": [
                    [ids, codec.decode(ids), pieces(codec, ids, []), pieces(codec, ids, ["e", " th"])]
                    for ids in random_ids
                ],
            }
        )
    GoldenFile().write(json.loads(json.dumps(cases)))


if __name__ == "__main__":
    main()
