"""Chat templates: from a conversation to the text of a prompt, as transformers' apply_chat_template does."""

from __future__ import annotations

import binascii
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tformer_runtime.base.child_process import ChildEndedError, ChildProcess
from tformer_runtime.base.errors import InputError, MissingExtraError, UnsupportedCallError
from tformer_runtime.base.extras import install_command
from tformer_runtime.format.manifest import Manifest

Message = Mapping[str, Any]  # "role" and "content": a text, or parts with images
Tools = Sequence[Mapping[str, Any]]  # descriptions of functions, in the form of OpenAI's API and of transformers
MAX_TEMPLATE_SECONDS = 5  # of processor time; those of transformers' models take milliseconds
MAX_REPLY_SECONDS = 15.0  # of any time, for a system without a limit of processor time, or a process that stands still
IMAGE_KEYS = ("image", "path", "base64", "url")  # of a part of a message, as in transformers


class Template(Protocol):
    """A function from messages to the text of a prompt."""

    def __call__(self, messages: Sequence[Message], tools: Tools | None = None) -> str: ...


_worker = ChildProcess(Path(__file__).with_name("template_worker.py"), MAX_REPLY_SECONDS)


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
            'a conversation is a text, or a list of messages such as {"role": "user", "content": "a text"}; the '
            "last message is answered"
        )
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


def messages_of_line(line: str) -> Any:
    """Return the messages of a JSON list, or any other text as one message."""
    if not line.lstrip().startswith("["):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line  # a text that begins with a bracket


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Return the images of a conversation in their order. Raise InputError for one that would be downloaded."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [_image_of(part) for content in contents for part in content if part["type"] == "image"]


def _image_of(part: Mapping[Any, Any]) -> Any:
    """Return the image of a part of a message."""
    key = next(key for key in IMAGE_KEYS if part.get(key) is not None)
    image = part[key]
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise InputError(f"{image} is not downloaded: give the name of a file, or the image itself")
    if key != "base64":
        return image
    try:
        return binascii.a2b_base64(image, strict_mode=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"the base64 text of an image is damaged: {error}") from error


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation for the chat template, which places images and does not read them."""

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
    """Return whether a value is a text or an image of a message."""
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("text"), str) if value.get("type") == "text" else _is_image_part(value)


def _is_image_part(value: Mapping[Any, Any]) -> bool:
    return value.get("type") == "image" and any(value.get(key) is not None for key in IMAGE_KEYS)


def compile_template(text: str, tokens: Mapping[str, str]) -> Template:
    """Return a function from messages to the text of the prompt. The template has the variables of apply_chat_template.

    It runs in a process of its own, `template_worker`, with limits of time and memory.

    text: a Jinja template.
    tokens: the texts of special tokens, by names such as bos_token.
    Raise InputError for an invalid template. The function raises InputError if the template fails or takes too long, if
    the messages are not JSON, or if there are tools and the template does not read them.
    """
    variables = {**tokens, "tools": None, "documents": None, "add_generation_prompt": True}
    names = _ask("read", text)["names"]

    def fill_in(messages: Sequence[Message], tools: Tools | None = None) -> str:
        if tools and "tools" not in names:
            raise InputError("the chat template has no place for tools: leave them out, or describe them in a message")
        return str(_ask("filled in", text, {**variables, "messages": messages, "tools": tools or None})["text"])

    return fill_in


def unknown_tokens(text: str, tokens: Mapping[str, str]) -> list[str]:
    """Return the special tokens of a template, such as bos_token, without a text in `tokens`. They would be empty."""
    return [name for name in _ask("read", text)["names"] if name.endswith("_token") and name not in tokens]


def _ask(action: str, template: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the worker's reply. Raise InputError for an error in it, MissingExtraError without jinja2."""
    if variables is None and importlib.util.find_spec("jinja2") is None:  # each template is read first
        raise MissingExtraError(f"chat templates need jinja2: {install_command('chat')}")
    request = {"template": template, "seconds": MAX_TEMPLATE_SECONDS}
    try:
        reply: dict[str, Any] = _worker.ask(
            request if variables is None else {**request, "variables": _plain(variables)}
        )
    except RecursionError as error:
        raise InputError("the messages of the conversation are nested too deeply") from error
    except ChildEndedError as error:
        raise InputError(f"the chat template cannot be {action}: its process {error}") from error
    if "refused" in reply:
        raise InputError(f"the chat template refuses: {reply['refused']}")
    if "error" in reply:
        raise InputError(f"the chat template cannot be {action}: {reply['error']}")
    return reply


def _plain(value: Any) -> Any:
    """Return a part of a message as JSON has it. Raise InputError for a value that JSON has not."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    raise InputError(f"a message holds a value of type {type(value).__name__}: give texts, numbers, lists and mappings")
