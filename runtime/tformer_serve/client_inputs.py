"""Inputs of clients, which are untrusted: a text never names a file of the server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tformer_runtime.base.errors import InputError
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.inputs import Input


def checked_input(manifest: Manifest, input: str | list[Any] | dict[str, Any]) -> Input:
    """Return an input of a client for the runtime, for which a text could name a file of the server.

    input: a text, ids, or a mapping from the names of the inputs. The value of a picture or a sound is {"base64": …},
        or a list of them.
    Raise InputError for a text where the model reads no text.
    """
    texts = _text_inputs(manifest)
    if isinstance(input, Mapping) and "base64" not in input:
        return {name: value if name in texts else _without_names(name, value) for name, value in input.items()}
    if manifest.decode is not None and manifest.takes_prompt:
        read = [manifest.decode.step.name]
    else:
        read = [spec.name for spec in manifest.encode.inputs if spec.role != "mask"] if manifest.encode else []
    checked: Input = input if all(name in texts for name in read) else _without_names("input", input)
    return checked


def _text_inputs(manifest: Manifest) -> list[str]:
    """Return the names of the inputs that are texts or ids, whose texts are read as texts."""
    names = [spec.name for spec in manifest.encode.inputs if spec.role in ("ids", "types")] if manifest.encode else []
    return [*names, manifest.decode.step.name] if manifest.decode is not None else names


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
