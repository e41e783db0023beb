"""A chat template for a model of one's own, refused where it could not make a prompt."""

from __future__ import annotations

from dataclasses import replace

from tformer_export.sources.base import Source
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.preprocess.chat_template import compiled, unknown_tokens


def with_template(source: Source, template: str) -> Source:
    """The source with this Jinja text, in the place of one that it may have. OptionError for what is none, for a model
    that does not go on with a text alone, and where the template names special tokens whose texts nobody said."""
    if not isinstance(template, str) or not template.strip():
        given = "empty" if isinstance(template, str) else f"of type {type(template).__name__}"
        raise OptionError(f"the chat template is {given}: give the Jinja text that makes a prompt of a conversation")
    others = [name for name in source.given if name != source.step]
    reason = None
    if source.step is None:
        reason = "is run once for an input"
    elif others:
        reason = f"reads {', '.join(others)} beside {source.step}"
    elif source.series is not None:
        reason = "reads numbers"
    if reason:
        raise OptionError(f"a chat template is for a model that goes on with a text alone, and this one {reason}")
    try:
        compiled(template, source.chat_tokens)
    except InputError as error:
        raise OptionError(str(error)) from error
    if unknown := unknown_tokens(template, source.chat_tokens):
        raise OptionError(f"the chat template names {', '.join(unknown)}, unknown here: write the text of it instead")
    return replace(source, chat_template=template)
