"""Chat templates: a conversation as the text that a model was trained to go on with, as transformers'
apply_chat_template makes it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tformer_runtime.base.errors import InputError, MissingExtraError, TformerError, UnsupportedCallError
from tformer_runtime.format.manifest import Manifest

Message = Mapping[str, str]  # who says it, "role", and what, "content"
Template = Callable[[Sequence[Message]], str]


def template_of(manifest: Manifest) -> Template:
    """The file's own. UnsupportedCallError if it has none."""
    if manifest.chat_template is None:
        raise UnsupportedCallError(
            "the file has no chat template: export the model from a folder whose tokenizer has one, or "
            "with --chat-template"
        )
    return compiled(manifest.chat_template, manifest.chat_tokens)


def conversation(given: Any, system: str | None = None) -> list[Message]:
    """A text, or messages, as messages. InputError for what is neither. system: a message before them."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    ordered = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not ordered or not messages or not all(map(_is_message, messages)):
        raise InputError(
            'a conversation is a text, or a list of messages such as {"role": "user", "content": "a text"}, the last '
            "of which is answered"
        )
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(given.get(name), str) for name in ("role", "content"))


def compiled(text: str, tokens: Mapping[str, str]) -> Template:
    """A template as a function of messages, with what apply_chat_template gives one. InputError if it cannot be read.

    tokens: the names of special tokens, such as bos_token, and their texts.
    """
    environment = _environment()
    given = {**tokens, "tools": None, "documents": None, "add_generation_prompt": True}
    with _in_a_sentence("read"):
        template = environment.from_string(text)

    def made(messages: Sequence[Message]) -> str:
        with _in_a_sentence("filled in"):
            return str(template.render(messages=list(messages), **given))

    return made


def unknown_tokens(text: str, tokens: Mapping[str, str]) -> list[str]:
    """The special tokens that a template names, such as bos_token, and that `tokens` lacks: they would be nothing."""
    parsed = _environment().parse(text)
    from jinja2.meta import find_undeclared_variables

    named = find_undeclared_variables(parsed)
    return sorted(name for name in named if name.endswith("_token") and name not in tokens)


def _environment() -> Any:
    """Jinja as apply_chat_template has it. MissingExtraError without it."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("chat templates need jinja2: pip install 'tformer[chat]'") from error

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}, which marks what training learns: here, what is in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise InputError(f"the chat template refuses: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json  # without escapes for HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    return environment


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    try:
        yield
    except TformerError:
        raise
    except Exception as error:  # of the template, or of what it does with values
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the chat template cannot be {what}: {reason}") from error
