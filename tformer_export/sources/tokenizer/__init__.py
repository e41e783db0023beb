"""Conversion of the tokenizer of a Hugging Face folder to tokenizers' JSON, checked against the original.

The class of the tokenizer does not matter: `candidates` proposes several conversions, and the first that agrees with
the original (`reference`) on texts and ids (`check`) is used. `sentencepiece` converts a SentencePiece model. `load` is
the entry point.
"""

from tformer_export.sources.tokenizer.load import (
    has_tokenizer,
    load_tokenizer,
    read_chat_template,
    read_chat_tokens,
    read_encoder_tokenizer,
    read_prompt_tokenizer,
    read_tokenizers,
    read_writing_tokenizer,
)

__all__ = [
    "has_tokenizer",
    "load_tokenizer",
    "read_chat_template",
    "read_chat_tokens",
    "read_encoder_tokenizer",
    "read_prompt_tokenizer",
    "read_tokenizers",
    "read_writing_tokenizer",
]
