"""The tokenizer of a Hugging Face folder → tokenizers' JSON, checked: it reads and writes what the original does.

Nobody asks what kind of tokenizer it is: `candidates` proposes several, and the first that agrees with the original
(`reference`) on texts and ids (`check`) is taken. `sentencepiece` makes one of a SentencePiece model. `load` is the
way.
"""

from tformer_export.sources.tokenizer.load import (
    has_tokenizer,
    load_tokenizer,
    read_chat_template,
    read_chat_tokens,
    read_encoder_tokenizer,
    read_tokenizers,
    read_writing_tokenizer,
)

__all__ = [
    "has_tokenizer",
    "load_tokenizer",
    "read_chat_template",
    "read_chat_tokens",
    "read_encoder_tokenizer",
    "read_tokenizers",
    "read_writing_tokenizer",
]
