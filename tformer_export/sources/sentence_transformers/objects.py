"""A model of sentence-transformers in memory. It is saved into a folder for a while, and read as that folder is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tformer_export.sources.base import Source
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.sentence_transformers.saved import CROSS_ENCODER, SENTENCE_ENCODER
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, SINGLE_LABEL

_KINDS = {SENTENCE_ENCODER, CROSS_ENCODER, "SparseEncoder", "MultiVectorEncoder"}  # the last two are refused by name


def is_sentence_transformers_model(module: Any) -> bool:
    """Return whether a module is a model of sentence-transformers."""
    return _kind(module) is not None


def _kind(module: Any) -> str | None:
    bases = [base for base in type(module).__mro__ if base.__module__.startswith("sentence_transformers")]
    return next((base.__name__ for base in bases if base.__name__ in _KINDS), None)


def from_sentence_transformers(module: Any, read: Callable[[Path], Source]) -> Source:
    """Read a model of sentence-transformers in memory.

    read: a function that reads a folder.

    Raises SourceError for a model that cannot be saved, or whose folder has another meaning.
    """
    with TemporaryDirectory(prefix="tformer-") as name:
        try:
            module.save(name, create_model_card=False)
        except Exception as error:  # its modules may be of any class
            raise SourceError(
                f"the {type(module).__name__} cannot be saved, which reading it needs: {error}"
            ) from error
        source = read(Path(name))
    source = replace(source, name=type(module).__name__)
    if _kind(module) == CROSS_ENCODER:
        _check_activation(module, source)
    elif not isinstance(module.max_seq_length, float):  # infinite, and fixed, without a transformer
        source = replace(source, own_pipeline=_encode(module))
    return source


def _encode(module: Any) -> Callable[[Any, int | None], torch.Tensor]:
    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        max_length = module.max_seq_length
        module.max_seq_length = max_length if max_tokens is None else max_tokens
        try:
            vector: torch.Tensor = module.encode(sample, convert_to_tensor=True, show_progress_bar=False)
        finally:
            module.max_seq_length = max_length
        return vector.float().cpu()

    return answer


def _check_activation(module: Any, source: Source) -> None:
    """Raise SourceError if the activation of a CrossEncoder has arguments, which its folder does not hold."""
    drawn = torch.linspace(-3, 3, 4 * max(1, len(source.output_meaning.labels))).reshape(4, -1)
    named, adapter = drawn, source.module
    assert isinstance(adapter, Adapter)
    for head in adapter.heads:
        named = head(named)
    problem_type = source.output_meaning.problem_type
    named = (
        named.sigmoid() if problem_type == MULTI_LABEL else named.softmax(-1) if problem_type == SINGLE_LABEL else named
    )
    if not torch.allclose(module.activation_fn(drawn), named, atol=1e-6):
        raise SourceError(
            f"the activation of scores {module.activation_fn} gives other numbers than the one of its name without "
            "arguments, and sentence-transformers saves only the name: it is not supported"
        )
