"""The end of reading a source: the caller's overrides replace or complete the model's own values."""

from __future__ import annotations

import logging
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
from tformer_runtime.decoding.options import GenerationOptions, Settings, file_defaults
from tformer_runtime.format.manifest import SpecialTokens

logger = logging.getLogger(__name__)


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
    if overrides.generation_defaults is None:
        source = _drop_unmatched_stop_strings(source)
    if overrides.chat_template is not None:
        source = with_template(source, overrides.chat_template)
        if source.step_input not in source.tokenizers:
            raise OptionError("a chat template needs a tokenizer: give one")
    if overrides.preprocessor is not None:
        source = with_preprocessing(
            source, overrides.preprocessor, overrides.labels is not None or overrides.problem_type is not None
        )
    source = with_task(source, overrides.labels, overrides.problem_type, overrides.pooling, overrides.normalize)
    if source.step_input is None and overrides.max_length is not None:
        source = replace(source, max_length=min(overrides.max_length, source.max_length or overrides.max_length))
    return source


def _drop_unmatched_stop_strings(source: Source) -> Source:
    """Drop the model's own stop strings that the runtime cannot find in a text, and warn of them.

    The runtime needs the tokenizer for them, and its texts hold no special tokens.
    """
    strings = file_defaults(source.generation_defaults).get("stop_strings")
    if not strings or source.step_input is None:
        return source
    tokenizer = source.tokenizers.get(source.step_input)
    if tokenizer is None:
        unmatched, reason = strings, "the file has no tokenizer"
    else:
        added = Tokenizer.from_str(tokenizer).get_added_tokens_decoder().values()
        special_texts = [token.content for token in added if token.special]
        unmatched = tuple(string for string in strings if any(text in string for text in special_texts))
        reason = "special tokens are not part of a generated text"
    if not unmatched:
        return source
    logger.warning("the model's stop_strings %s are not carried over: %s", ", ".join(map(repr, unmatched)), reason)
    defaults = {name: value for name, value in source.generation_defaults.items() if name != "stop_strings"}
    if matched := [string for string in strings if string not in unmatched]:
        defaults["stop_strings"] = matched
    return replace(source, generation_defaults=defaults)


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
