"""An input as a line of text: ids between spaces, or JSON for a model that reads several inputs or numbers."""

from __future__ import annotations

import json
from typing import Any

from tformer_runtime.base.errors import InputError, quotable
from tformer_runtime.format.manifest import Manifest, RequestInput
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs


def read_inputs(manifest: Manifest) -> list[RequestInput]:
    """Return the inputs that an input of a caller holds a value for, without the step input."""
    return [spec for spec in manifest.encode.inputs if spec.role in ("ids", "data")] if manifest.encode else []


def reads_json(manifest: Manifest) -> bool:
    """Return whether a line holds JSON: the model reads several inputs, or numbers, and no prompt."""
    specs = read_inputs(manifest)
    if manifest.takes_prompt or len(specs) != 1:
        return not manifest.takes_prompt and len(specs) > 1
    (spec,) = specs
    is_file = spec.name in image_inputs(manifest.preprocessing) or audio_of(manifest) is not None
    return spec.role == "data" and not is_file and spec.name not in manifest.tokenizer_of


def json_of(line: str, manifest: Manifest) -> Any:
    """Parse the JSON of a line: an array, a number, or an object from names of inputs to values.

    Raises InputError for a line that is not JSON.
    """
    try:
        return json.loads(line)
    except RecursionError as error:
        raise InputError(f"{line[:60]!r} is nested too deeply") from error
    except ValueError as error:
        names = [spec.name for spec in read_inputs(manifest)]
        form = "{" + ", ".join(f"{json.dumps(name)}: …" for name in names) + "}"
        reads = f"several inputs: give {form}" if len(names) > 1 else f"numbers: {names[0]}"
        raise InputError(f"{line[:60]!r} is not JSON ({quotable(error)}), and the model reads {reads}") from error


def line_input(line: str, manifest: Manifest, ids: bool) -> Any:
    """Parse a line into an input of a model that generates: a text, ids between spaces, or JSON."""
    if reads_json(manifest):
        return json_of(line, manifest)
    return ids_of(line) if ids else line


def ids_of(line: str) -> list[int]:
    """Parse ids between spaces."""
    try:
        return [int(word) for word in line.split()]
    except ValueError:
        raise InputError(f"{line[:60]!r} is not a list of ids") from None
