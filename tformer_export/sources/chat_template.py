"""A chat template for the user's own model. One that cannot make a prompt is refused."""

from __future__ import annotations

from dataclasses import replace

from tformer_export.sources.base import Source
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.preprocess.chat_template import compile_template, unknown_tokens


def with_template(source: Source, template: str) -> Source:
    """Set the chat template of a source.

    Raises OptionError for a text that is not a Jinja template, for a model that does not continue a text, and for a
    template that names special tokens of unknown text.
    """
    if not isinstance(template, str) or not template.strip():
        kind = "empty" if isinstance(template, str) else f"of type {type(template).__name__}"
        raise OptionError(f"the chat template is {kind}: give Jinja text that turns a conversation into a prompt")
    others = [name for name in source.caller_inputs if name != source.step_input]
    reason = None
    if source.step_input is None:
        reason = "is a single-pass model"
    elif others:
        reason = f"reads {', '.join(others)} and {source.step_input}"
    elif source.series is not None:
        reason = "reads numbers"
    if reason:
        raise OptionError(f"a chat template is for a model that continues a text, but this model {reason}")
    try:
        compile_template(template, source.chat_tokens)
    except InputError as error:
        raise OptionError(str(error)) from error
    if unknown := unknown_tokens(template, source.chat_tokens):
        raise OptionError(
            f"the chat template uses {', '.join(unknown)}, whose text is unknown: write the text instead of the name"
        )
    return replace(source, chat_template=template)
