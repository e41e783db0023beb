"""The tokenizers and the chat template of a Hugging Face folder."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_export.sources.tokenizer.candidates import candidate_tokenizers
from tformer_export.sources.tokenizer.check import find_difference
from tformer_export.sources.tokenizer.reference import CandidateTokenizer, ReferenceTokenizer
from tformer_export.sources.untrusted_files import read_json
from tformer_runtime.base.errors import SourceError
from tformer_runtime.base.extras import install_command

_FILES = re.compile(r"token|vocab|merges|spiece|sentencepiece|bpe|\.spm$|\.model$|\.tiktoken$", re.IGNORECASE)
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".onnx", ".h5", ".msgpack", ".pt", ".gguf")
_REMEDY = (
    "give a tokenizer.json with --tokenizer (tokenizer=), or take the tokenizer's files out of the folder to export "
    "without one"
)
logger = logging.getLogger(__name__)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds any file of a tokenizer."""
    return any(_FILES.search(f.name) and not f.name.endswith(_WEIGHTS) for f in folder.iterdir())


def read_tokenizers(folder: Path, source: str | None, step: str) -> dict[str, str]:
    """Convert a folder's tokenizers to tokenizers' JSON, for the request input, if there is one, and the step input.

    source, step: the names of these inputs.

    Raises SourceError if no conversion agrees with the original.
    """
    original = ReferenceTokenizer(load_tokenizer(folder))
    _check_vocabulary(original)
    both, differs = _find_equal_candidate(original, reads=True, writes=True)
    if source is None:
        return {step: _to_json(original, both, differs)}
    target = ReferenceTokenizer(original.tokenizer, target=True)
    reading, differs = (
        (both, differs) if both is not None else _find_equal_candidate(original, reads=True, writes=False)
    )
    text = _to_json(original, reading, differs)
    writing, differs = _find_equal_candidate(target, target.can_read, writes=True, first=reading)
    return {source: text, step: _to_json(target, writing, differs)}


def read_encoder_tokenizer(tokenizer: Any) -> tuple[str, Any]:
    """Convert a transformers tokenizer to tokenizers' JSON that reads texts and pairs; return it with the tokenizer.

    Raises SourceError if no conversion agrees with the original.
    """
    original = ReferenceTokenizer(tokenizer)
    _check_vocabulary(original)
    form, differs = _find_equal_candidate(original, reads=True, writes=False, pairs=True)
    return _to_json(original, form, differs), original.tokenizer


def read_writing_tokenizer(tokenizer: Any, below: int | None) -> str:
    """Convert a transformers tokenizer to tokenizers' JSON that writes ids.

    below: ids from here on are not text and are not compared.

    Raises SourceError if no conversion agrees with the original.
    """
    original = ReferenceTokenizer(tokenizer)
    _check_vocabulary(original)
    if below is not None:
        original.ids = [i for i in original.ids if i < below]
    form, differs = _find_equal_candidate(original, reads=False, writes=True)
    return _to_json(original, form, differs)


def read_prompt_tokenizer(tokenizer: Any) -> str:
    """Convert a transformers tokenizer to tokenizers' JSON that reads prompts and writes their continuations.

    Raises SourceError if no conversion agrees with the original.
    """
    original = ReferenceTokenizer(tokenizer)
    _check_vocabulary(original)
    both, differs = _find_equal_candidate(original, reads=True, writes=True)
    return _to_json(original, both, differs)


def read_chat_template(folder: Path) -> str | None:
    """Read the chat template of a folder, from chat_template.jinja or tokenizer_config.json; None if it has none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = read_json(config, missing={}).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise SourceError(f"the chat template in {folder} cannot be read: {error}") from error
    if isinstance(template, list):  # several, by name
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def read_chat_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that a chat template may name, such as bos_token → their texts."""
    return {
        str(name): str(text)
        for name, text in load_tokenizer(folder).special_tokens_map.items()
        if isinstance(text, str)
    }


def load_tokenizer(folder: Path) -> Any:
    """Load a folder's tokenizer with transformers. Raises SourceError if it cannot be loaded."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        if "sentencepiece" in str(error).lower() and isinstance(error, ImportError):
            raise SourceError(f"{folder}'s tokenizer needs sentencepiece: {install_command('hf')}") from error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s tokenizer cannot be loaded: {reason.strip()}; {_REMEDY}") from error


def _check_vocabulary(original: ReferenceTokenizer) -> None:
    """Raise SourceError if the vocabulary has special tokens alone: transformers makes one if its file is missing."""
    special = set(map(str, original.tokenizer.all_special_tokens))
    if all(token in special or not token.strip("▁ ") for token in map(str, original.tokenizer.get_vocab())):
        raise SourceError(f"{original.kind}'s vocabulary is empty: the folder lacks the file that it is in")


def _find_equal_candidate(
    original: ReferenceTokenizer,
    reads: bool,
    writes: bool,
    first: CandidateTokenizer | None = None,
    pairs: bool = False,
) -> tuple[CandidateTokenizer | None, str]:
    """Return the first candidate that agrees with the original, or None, and the difference of the most faithful one.

    first: a candidate that is tried before all others.
    """
    differs = "it has neither a backend nor a SentencePiece model, and transformers has no converter for it"
    if first is not None and find_difference(original, first, reads, writes) is None:
        return first, ""
    with TORCH_PATCH_LOCK, warnings.catch_warnings():  # filters are process-wide
        warnings.simplefilter("ignore")  # warnings of converters; the comparison decides
        for number, form in enumerate(candidate_tokenizers(original)):
            form.tokenizer.no_padding()  # a backend or its file may have it set
            form.tokenizer.no_truncation()
            problem = find_difference(original, form, reads, writes, pairs)
            if problem is None:
                return form, ""
            differs = problem if number == 0 else differs
    return None, differs


def _to_json(original: ReferenceTokenizer, form: CandidateTokenizer | None, differs: str) -> str:
    if form is None:
        raise SourceError(f"{original.kind} cannot be turned into tokenizers' JSON format: {differs}; {_REMEDY}")
    return str(form.tokenizer.to_str())
