"""Bodies of forms with a file, as multipart/form-data."""

from __future__ import annotations

from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, create_form_parser

from tformer_serve.errors import ApiError

_MAX_FIELD_BYTES = 64 << 10


def read_form(content_type: str, body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the fields of a form and its files, by name. A field NAME[] is the list NAME.

    Raise ApiError for a body that is not a form, and for a field that it has twice.
    """
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(400, "the body must be a form, sent as Content-Type: multipart/form-data", "invalid_form")
    fields: list[Field] = []
    files: list[File] = []
    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}  # the body is in memory, so a file on the disk would be no gain
    try:
        parser = create_form_parser(
            {"Content-Type": content_type.encode("latin-1")}, fields.append, files.append, config
        )
        parser.write(body)
        parser.finalize()
        parser.close()
    except (FormParserError, ValueError) as error:  # also UnicodeError
        raise ApiError(400, "the form is damaged: send it as multipart/form-data", "invalid_form") from error
    values: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    for field in fields:
        _add_field(values, _text(field.field_name, "the name of a field"), field.value)
    for file in files:
        name = _text(file.field_name, "the name of a file")
        if name in contents:
            raise ApiError(400, f"the form has several files {name[:100]!r}: send one", "invalid_form", name[:100])
        file.file_object.seek(0)
        contents[name] = file.file_object.read()
    return values, contents


def _add_field(values: dict[str, Any], name: str, value: bytes | None) -> None:
    """Add a field to others. Raise ApiError for one that is there already, or that is too long."""
    if value is not None and len(value) > _MAX_FIELD_BYTES:
        raise ApiError(
            413, f"{name[:100]} has more than {_MAX_FIELD_BYTES:,} bytes: shorten it", "too_large", name[:100]
        )
    text = _text(value or b"", name[:100])
    if name.endswith("[]"):
        values.setdefault(name.removesuffix("[]"), []).append(text)
    elif name in values:
        raise ApiError(400, f"the form has the field {name[:100]!r} twice: send it once", "invalid_form", name[:100])
    else:
        values[name] = text


def _text(value: bytes | None, what: str) -> str:
    try:
        return (value or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{what} is not UTF-8", "invalid_form") from error
