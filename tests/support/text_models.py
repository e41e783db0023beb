"""Tiny vocabularies for several kinds of tokenizers, and the sizes of tiny models that read their ids."""

from __future__ import annotations

from tokenizers import pre_tokenizers

TEXT = "the a good bad film day night was is not very old new model reads file of and we it"
WORDS = TEXT.split()
SHAPE = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, max_position_embeddings=40,
    initializer_range=0.3,
)  # fmt: skip
MAX_TOKENS = 38  # length to which the tokenizers truncate


def wordpiece_vocabulary():
    """Return the vocabulary of words and pieces of words for WordPiece."""
    return {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "!", "b", "##ad"])}


def byte_pairs(*special_tokens):
    """Return the vocabulary and merges of bytes and a few pairs for byte-level BPE."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("o", "o"), ("i", "l")]
    tokens = [*special_tokens, *letters, *("".join(pair) for pair in merges)]
    return {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}


def unigram_pieces():
    """Return pieces and their scores for Unigram."""
    special_tokens = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    return [
        *special_tokens,
        *((f"▁{word}", -1.0 - i / 8) for i, word in enumerate(WORDS)),
        *((c, -9.0) for c in "abcdefg▁"),
    ]
