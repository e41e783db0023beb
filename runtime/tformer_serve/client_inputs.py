"""Inputs of clients, which are untrusted: a text never names a file of the server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tformer_runtime.base.errors import InputError, quotable
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.inputs import Input


def checked_input(manifest: Manifest, input: str | list[Any] | dict[str, Any]) -> Input:
    """Return an input of a client for the runtime, for which a text could name a file of the server.

    input: a text, ids, or a mapping from the names of the inputs. The value of an image or a recording is
        {"base64": …}, or a list of them.
    Raise InputError for a text where the model reads no text.
    """
    are_texts = _inputs(manifest)
    if not isinstance(input, Mapping) or "base64" in input:
        is_text = manifest.takes_prompt or all(are_texts.values())  # the prompt, or what an encoder reads
        value: Input = input if is_text else _without_names("input", input)
        return value
    if unknown := [name for name in input if name not in are_texts]:
        raise InputError(f"the model reads {', '.join(are_texts)}, not {quotable(unknown[0])}")
    return {name: value if are_texts[name] else _without_names(name, value) for name, value in input.items()}


def _inputs(manifest: Manifest) -> dict[str, bool]:
    """Return the names of the inputs, and for each whether it is a text or ids, whose text is read as a text."""
    specs = manifest.encode.inputs if manifest.encode else ()
    inputs = {spec.name: spec.role in ("ids", "types") for spec in specs if spec.role != "mask"}
    if manifest.decode is not None and manifest.takes_prompt:
        inputs[manifest.decode.step.name] = True
    return inputs


def _without_names(name: str, value: Any) -> Any:
    """Return a value in which each {"base64": …} is bytes. Raise InputError for a text, which could name a file."""
    if isinstance(value, str):
        raise InputError(f'{name} takes no text: give {{"base64": "…"}} with the content of the file, or numbers')
    if isinstance(value, Mapping):
        if set(value) != {"base64"} or not isinstance(value["base64"], str):
            raise InputError(f'{name} takes {{"base64": "…"}} with the content of a file, not other fields')
        return decoded_base64(name, value["base64"])
    return [_without_names(name, part) for part in value] if isinstance(value, list) else value


def decoded_base64(name: str, text: str) -> bytes:
    """Return the bytes of a text in base64. Raise InputError if it is damaged. name: of the field."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the base64 of {name} is damaged: {error}") from error
