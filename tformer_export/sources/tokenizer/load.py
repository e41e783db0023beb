"""The tokenizers and the chat template of a Hugging Face folder."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tformer_export.sources.tokenizer.candidates import forms
from tformer_export.sources.tokenizer.check import difference
from tformer_export.sources.tokenizer.reference import Form, Original
from tformer_runtime.base.errors import SourceError

_FILES = re.compile(r"token|vocab|merges|spiece|sentencepiece|bpe|\.spm$|\.model$|\.tiktoken$", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".onnx", ".h5", ".msgpack", ".pt", ".gguf")
_INSTEAD = (
    "give a tokenizer.json with --tokenizer (tokenizer=), or take the tokenizer's files out of the folder to export "
    "without one"
)
logger = logging.getLogger(__name__)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds any file of a tokenizer."""
    return any(_FILES.search(f.name) and not f.name.endswith(_WEIGHTS) for f in folder.iterdir())


def read_tokenizers(folder: Path, source: str | None, step: str) -> dict[str, str]:
    """Texts in tokenizers' JSON format for the request input, if there is one, and for the step input.

    SourceError where none can be made that reads and writes what the folder's own does.
    """
    original = Original(load_tokenizer(folder))
    _check_vocabulary(original)
    both, differs = _agreeing(original, reads=True, writes=True)
    if source is None:
        return {step: _text(original, both, differs)}
    target = Original(original.tokenizer, target=True)
    reading, differs = (both, differs) if both is not None else _agreeing(original, reads=True, writes=False)
    text = _text(original, reading, differs)
    writing, differs = _agreeing(target, target.can_read, writes=True, first=reading)
    return {source: text, step: _text(target, writing, differs)}


def read_encoder_tokenizer(tokenizer: Any) -> tuple[str, Any]:
    """Of a transformers tokenizer: text in tokenizers' JSON format that reads texts and pairs as it does, and the
    tokenizer itself. SourceError where none can be made."""
    original = Original(tokenizer)
    _check_vocabulary(original)
    form, differs = _agreeing(original, reads=True, writes=False, pairs=True)
    return _text(original, form, differs), original.tokenizer


def read_writing_tokenizer(tokenizer: Any, below: int | None) -> str:
    """Of a transformers tokenizer: text in tokenizers' JSON format that writes ids as it does. below: ids from here on
    are no text, whatever it writes for them. SourceError where none can be made."""
    original = Original(tokenizer)
    _check_vocabulary(original)
    if below is not None:
        original.ids = [i for i in original.ids if i < below]
    form, differs = _agreeing(original, reads=False, writes=True)
    return _text(original, form, differs)


def read_chat_template(folder: Path) -> str | None:
    """The Jinja text that makes a prompt of a conversation: chat_template.jinja, or in tokenizer_config.json."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else None
    except (OSError, ValueError, AttributeError) as error:
        raise SourceError(f"the chat template in {folder} cannot be read: {error}") from error
    if isinstance(found, list):  # several, by name
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
    if isinstance(found, Mapping):
        found = found.get("default")
    return found if isinstance(found, str) else None


def read_chat_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a chat template may name, such as bos_token, and their texts."""
    return {
        str(name): str(text)
        for name, text in load_tokenizer(folder).special_tokens_map.items()
        if isinstance(text, str)
    }


def load_tokenizer(folder: Path) -> Any:
    """transformers' own."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        if "sentencepiece" in str(error).lower() and isinstance(error, ImportError):
            raise SourceError(f"{folder}'s tokenizer needs sentencepiece: pip install 'tformer[hf]'") from error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s tokenizer cannot be loaded: {reason.strip()}; {_INSTEAD}") from error


def _check_vocabulary(original: Original) -> None:
    """transformers makes up a vocabulary of special tokens where the file of the real one is missing."""
    special = set(map(str, original.tokenizer.all_special_tokens))
    if all(token in special or not token.strip("▁ ") for token in map(str, original.tokenizer.get_vocab())):
        raise SourceError(f"{original.kind}'s vocabulary is empty: the folder lacks the file that it is in")


def _agreeing(
    original: Original, reads: bool, writes: bool, first: Form | None = None, pairs: bool = False
) -> tuple[Form | None, str]:
    """The first form that agrees with the original, or None; and how the most faithful differs.

    first: a form that is tried before all others.
    """
    differs = "it has neither a backend nor a SentencePiece model, and transformers has no converter for it"
    if first is not None and difference(original, first, reads, writes) is None:
        return first, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of converters, on what the check decides
        for number, form in enumerate(forms(original)):
            form.tokenizer.no_padding()  # which a backend may have been left with, or its file
            form.tokenizer.no_truncation()
            found = difference(original, form, reads, writes, pairs)
            if found is None:
                return form, ""
            differs = found if number == 0 else differs
    return None, differs


def _text(original: Original, form: Form | None, differs: str) -> str:
    if form is None:
        raise SourceError(f"{original.kind} cannot be turned into tokenizers' JSON format: {differs}; {_INSTEAD}")
    return str(form.tokenizer.to_str())
