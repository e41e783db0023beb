"""Chat templates: from a conversation to the text of a prompt, as transformers' apply_chat_template does."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tformer_runtime.base.errors import InputError, MissingExtraError, TformerError, UnsupportedCallError
from tformer_runtime.format.manifest import Manifest

Message = Mapping[str, Any]  # "role" and "content": a text, or parts with pictures
Template = Callable[[Sequence[Message]], str]
PICTURE_KEYS = ("image", "path", "base64", "url")  # of a part of a message, as in transformers


def template_of(manifest: Manifest) -> Template:
    """Return the chat template of a file. Raise UnsupportedCallError if it has none."""
    if manifest.chat_template is None:
        raise UnsupportedCallError(
            "the file has no chat template: export the model from a folder whose tokenizer has one, or "
            "with --chat-template"
        )
    return compile_template(manifest.chat_template, manifest.chat_tokens)


def conversation(messages: Any, system: str | None = None) -> list[Message]:
    """Return the messages of a conversation.

    messages: a text, or a sequence of messages. system: a system message before them.
    Raise InputError for other values.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        raise InputError(
            'a conversation is a text, or a list of messages such as {"role": "user", "content": "a text"}, the last '
            "of which is answered"
        )
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def pictures_of(messages: Sequence[Message]) -> list[Any]:
    """Return the pictures of a conversation in their order. Raise InputError for one that would be downloaded."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [_picture_of(part) for content in contents for part in content if part["type"] == "image"]


def _picture_of(part: Mapping[Any, Any]) -> Any:
    """Return the picture of a part of a message."""
    key = next(key for key in PICTURE_KEYS if part.get(key) is not None)
    picture = part[key]
    if isinstance(picture, str) and picture.startswith(("http://", "https://")):
        raise InputError(f"{picture} is not downloaded: give the name of a file, or the picture itself")
    if key != "base64":
        return picture
    try:
        return base64.b64decode(picture, validate=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"the base64 text of a picture is damaged: {error}") from error


def without_pictures(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation for the chat template, which places pictures and does not read them."""

    def placed(part: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {**part, "image": "", "base64": ""} if part["type"] == "image" else part

    contents = [message["content"] for message in messages]
    return [
        message if isinstance(content, str) else {**message, "content": list(map(placed, content))}
        for message, content in zip(messages, contents, strict=True)
    ]


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (isinstance(content, (list, tuple)) and all(map(_is_part, content)))


def _is_part(value: Any) -> bool:
    """Return whether a value is a text or a picture of a message."""
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("text"), str) if value.get("type") == "text" else _is_picture_part(value)


def _is_picture_part(value: Mapping[Any, Any]) -> bool:
    return value.get("type") == "image" and any(value.get(key) is not None for key in PICTURE_KEYS)


def compile_template(text: str, tokens: Mapping[str, str]) -> Template:
    """Return a function from messages to the text of the prompt. The template has the variables of apply_chat_template.

    text: a Jinja template.
    tokens: the texts of special tokens, by names such as bos_token.
    Raise InputError for an invalid template. The function raises InputError if the template fails.
    """
    environment = _environment()
    variables = {**tokens, "tools": None, "documents": None, "add_generation_prompt": True}
    with _errors_as_input_errors("read"):
        template = environment.from_string(text)

    def fill_in(messages: Sequence[Message]) -> str:
        with _errors_as_input_errors("filled in"):
            return str(template.render(messages=list(messages), **variables))

    return fill_in


def unknown_tokens(text: str, tokens: Mapping[str, str]) -> list[str]:
    """Return the special tokens of a template, such as bos_token, without a text in `tokens`. They would be empty."""
    parsed = _environment().parse(text)
    from jinja2.meta import find_undeclared_variables

    variables = find_undeclared_variables(parsed)
    return sorted(name for name in variables if name.endswith("_token") and name not in tokens)


def _environment() -> Any:
    """Return a Jinja environment with the extensions of apply_chat_template. Raise MissingExtraError without jinja2."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("chat templates need jinja2: pip install 'tformer[chat]'") from error

    class Generation(Extension):
        """Replace {% generation %} … {% endgeneration %}, which marks text for training, by its content."""

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
    environment.filters["tojson"] = to_json  # Jinja's own filter escapes HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    return environment


@contextmanager
def _errors_as_input_errors(action: str) -> Iterator[None]:
    try:
        yield
    except TformerError:
        raise
    except Exception as error:  # Jinja's own, or any error of an expression in the template
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the chat template cannot be {action}: {reason}") from error
