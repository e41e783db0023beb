"""The end of reading a source: the caller's overrides replace or complete the model's own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from tformer_export.common.task import Task
from tformer_export.sources.base import Source, parse_special_tokens
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.hugging_face.images import with_preprocessing
from tformer_export.sources.hugging_face.single_pass import with_tokenizer
from tformer_export.sources.outcome import with_task
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.format.manifest import SpecialTokens


@dataclass(frozen=True)
class SourceOverrides:
    """Properties that the caller sets for a source. None stands for the model's own.

    tokenizer: text in tokenizers' JSON format for all inputs, or one for each input by name; or a tokenizer of
        transformers.

    The other fields are arguments of `export` and fields of its `Task`.
    """

    tokenizer: str | Mapping[str, str] | Callable[..., Any] | None = None
    task: str | None = None
    special_tokens: SpecialTokens | Mapping[str, Any] | None = None
    generation_defaults: Mapping[str, Any] | None = None
    series: Mapping[str, Any] | None = None
    chat_template: str | None = None
    preprocessor: Any = None
    labels: Any = None
    problem_type: str | None = None
    pooling: str | None = None
    normalize: bool = False
    max_length: int | None = None

    @classmethod
    def of(cls, task: str | Task | None = None, **others: Any) -> SourceOverrides:
        """Return the overrides in arguments of `export`, in which the task is a name or a `Task`."""
        stated = task if isinstance(task, Task) else Task(task)
        return cls(
            task=stated.name,
            labels=stated.labels,
            problem_type=stated.problem_type,
            pooling=stated.pooling,
            normalize=stated.normalize,
            **others,
        )


def finish(source: Source, overrides: SourceOverrides) -> Source:
    """Apply overrides to a source. Raises OptionError for overrides that do not fit the model or each other."""
    tokenizer, special = overrides.tokenizer, overrides.special_tokens
    if callable(tokenizer):
        source, tokenizer = with_tokenizer(source, tokenizer), None
    elif tokenizer is not None:
        source = replace(source, own_pipeline=None)
    stated: dict[str, Any] = {
        "tokenizers": dict.fromkeys(source.caller_inputs, tokenizer) if isinstance(tokenizer, str) else tokenizer,
        "task": overrides.task,
        "special_tokens": parse_special_tokens(special) if isinstance(special, Mapping) else special,
        "generation_defaults": overrides.generation_defaults,
        "series": overrides.series,
    }
    source = replace(source, **{name: value for name, value in stated.items() if value is not None})
    _check_texts(source)
    if overrides.chat_template is not None:
        source = with_template(source, overrides.chat_template)
        if source.step_input not in source.tokenizers:
            raise OptionError("a chat template makes texts, and there is no tokenizer to read them: give one")
    if overrides.preprocessor is not None:
        source = with_preprocessing(
            source, overrides.preprocessor, overrides.labels is not None or overrides.problem_type is not None
        )
    source = with_task(source, overrides.labels, overrides.problem_type, overrides.pooling, overrides.normalize)
    if source.step_input is None and overrides.max_length is not None:
        source = replace(source, max_length=min(overrides.max_length, source.max_length or overrides.max_length))
    return source


def _check_texts(source: Source) -> None:
    """Raise OptionError for generation defaults and tokenizers that the runtime would refuse after the export."""
    Settings.of(GenerationOptions(), source.generation_defaults)
    for name, text in source.tokenizers.items():
        if name not in source.example:
            raise OptionError(f"there is no input {name!r} for the tokenizer of that name: {', '.join(source.example)}")
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            raise OptionError(f"the tokenizer of {name} is not in tokenizers' JSON format: {error}") from error
