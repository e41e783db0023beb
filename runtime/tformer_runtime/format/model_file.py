"""Reading of a model file without loading its weights: its metadata, its manifest, and a model that maps the weights.

An ONNX file is one protobuf message, ``ModelProto``. Its metadata are a few short fields next to the (large) graph.
Reading them by hand skips the weights and needs no package. It also detects a damaged, foreign or too new file before
onnxruntime spends time on it.

onnxruntime reads a message whole and copies each weight out of it, but it maps external weights from their file. Then
memory holds only the weights that it packs for its kernels and the pages of the others that are read.
`read_mapped_model` declares the weights in the model file itself as external.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.base.special_files import endless_reason
from tformer_runtime.format.manifest import MANIFEST_KEY, Manifest
from tformer_runtime.format.manifest_checks import check_manifest
from tformer_runtime.format.onnx_fields import (
    GRAPH_INITIALIZER,
    MODEL_FUNCTIONS,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    MODEL_METADATA_PROPS,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
    TENSOR_DATA_LOCATION,
    TENSOR_DATA_LOCATION_EXTERNAL,
    TENSOR_EXTERNAL_DATA,
    TENSOR_RAW_DATA,
)
from tformer_runtime.format.onnx_wire import (
    BYTES,
    MAX_HEADER_BYTES,
    WireError,
    bytes_field,
    read_field_header,
    tag,
    varint,
    varint_field,
)

MAX_FIELD_NUMBER = 64  # ModelProto has a few dozen fields at most: a message with a higher number is not ONNX
MAX_METADATA_TEXT_BYTES = 1 << 30
MAX_INLINE_BYTES = 1024  # smaller weights stay in the model: onnxruntime reads sizes and shapes from them
BLOCK_BYTES = 1 << 14  # of one read: most fields of a graph are short, and a block holds many of them
WEIGHT_ALIGNMENT_BYTES = 64  # kernels read whole vectors, so that weights at other offsets are copied


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a model file.

    Raise ModelFileError if the file is not a tformer model, is damaged, or has another version than this runtime.
    """
    return manifest_of(path, read_metadata(path))


def manifest_of(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> Manifest:
    """Return the manifest in the metadata of a model file. Errors: see `read_manifest`."""
    if MANIFEST_KEY not in metadata:
        raise ModelFileError(f"{os.fspath(path)} has no tformer manifest: export the model with tformer-export")
    try:
        manifest = Manifest.from_json(metadata[MANIFEST_KEY])
        check_manifest(manifest)
    except ModelFileError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from error
    return manifest


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata_props of an ONNX file. Raise ModelFileError for an unreadable or incomplete file."""
    with _open(path) as content:
        return _model_metadata(content)


class _FileContent:
    """The bytes of an open file, by position. It keeps the block that was read last."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self._block, self._begin = b"", 0

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`. Raise WireError if the file has become shorter."""
        if begin < self._begin or end > self._begin + len(self._block):
            self.file.seek(begin)
            self._block, self._begin = self.file.read(max(end - begin, BLOCK_BYTES)), begin
        content = self._block[begin - self._begin : end - self._begin]
        if len(content) < end - begin:
            raise WireError
        return content

    def field_header(self, position: int, end: int) -> tuple[int, int, int]:
        """Run `read_field_header` for a message of onnx.proto.

        WireError also for a number that ONNX does not have.
        """
        header = self.read(position, min(position + MAX_HEADER_BYTES, self.size))
        number, start, length = read_field_header(header, 0, end - position)
        if number > MAX_FIELD_NUMBER:
            raise WireError
        return number, position + start, length


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[_FileContent]:
    """Yield the content of the file. Errors in opening and reading it become a ModelFileError."""
    with reading(path), Path(path).open("rb", buffering=0) as file:
        yield _FileContent(file, os.fstat(file.fileno()).st_size)


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors in opening and reading a model file, within the block, into a ModelFileError.

    Raise it at once for a pipe or a device, which may never end.
    """
    name = os.fspath(path)
    try:
        if (reason := endless_reason(path)) is not None:
            raise ModelFileError(reason)
        yield
    except FileNotFoundError as error:
        raise ModelFileError(f"{name} does not exist") from error
    except IsADirectoryError as error:
        raise ModelFileError(f"{name} is a folder, not a model file") from error
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror or error}") from error
    except RuntimeError as error:  # a link to itself, of pathlib before Python 3.13
        raise ModelFileError(f"{name} cannot be read: {error}") from error
    except (WireError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name} is not a whole ONNX file: it is something else, damaged or cut short") from error


def read_mapped_model(path: str | os.PathLike[str]) -> tuple[bytes, Path]:
    """Return the model with its large weights as references into the file, and the folder of the file.

    Time and memory grow with the size of the model without its weights. ModelFileError as for `read_metadata`.
    """
    resolved = Path(path).resolve()  # onnxruntime follows no link out of the folder
    try:
        os.fspath(resolved).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(
            f"{resolved!r} is not a name in UTF-8, which onnxruntime needs: rename the file"
        ) from error
    with _open(path) as content:
        parts: list[bytes] = []
        _copy_without_weights(content, 0, content.size, (MODEL_GRAPH, GRAPH_INITIALIZER), resolved.name, parts)
        return b"".join(parts), resolved.parent


def _copy_without_weights(
    content: _FileContent, begin: int, end: int, path: tuple[int, ...], file_name: str, parts: list[bytes]
) -> None:
    """Append a copy of a message to `parts`, with references in the place of large weights.

    begin, end: of the message in the file.
    path: field numbers that lead from the message to its tensors; empty if the message is a TensorProto.
    """
    copied = position = begin  # the message up to `copied` is in `parts`

    def copy_up_to(place: int) -> None:
        if copied < place:
            parts.append(content.read(copied, place))

    while position < end:
        number, start, length = content.field_header(position, end)
        if path and number == path[0]:
            copy_up_to(position)
            inner: list[bytes] = []
            _copy_without_weights(content, start, start + length, path[1:], file_name, inner)
            parts += [tag(number, BYTES), varint(sum(map(len, inner))), *inner]
            copied = start + length
        elif not path and number == TENSOR_RAW_DATA and _is_mappable(start, length):
            copy_up_to(position)
            for key, value in (("location", file_name), ("offset", str(start)), ("length", str(length))):
                entry = bytes_field(STRING_STRING_ENTRY_KEY, key.encode())
                entry += bytes_field(STRING_STRING_ENTRY_VALUE, value.encode())
                parts.append(bytes_field(TENSOR_EXTERNAL_DATA, entry))
            parts.append(varint_field(TENSOR_DATA_LOCATION, TENSOR_DATA_LOCATION_EXTERNAL))
            copied = start + length
        position = start + length
    copy_up_to(end)


def _is_mappable(offset: int, length: int) -> bool:
    return length > MAX_INLINE_BYTES and offset % WEIGHT_ALIGNMENT_BYTES == 0


def _model_metadata(content: _FileContent) -> dict[str, str]:
    """Read a ModelProto and return its metadata. Raise WireError if it has no version or no graph."""
    metadata: dict[str, str] = {}
    seen: set[int] = set()
    position = 0
    while position < content.size:
        number, start, length = content.field_header(position, content.size)
        seen.add(number)
        if number == MODEL_FUNCTIONS:  # functions that call each other twice double at each level
            raise ModelFileError("its graph has functions of its own, which the exporter does not write")
        if number == MODEL_METADATA_PROPS:
            key, value = _read_entry(content, start, start + length)
            metadata[key] = value
        position = start + length
    if not {MODEL_IR_VERSION, MODEL_GRAPH} <= seen:
        raise WireError
    return metadata


def _read_entry(content: _FileContent, position: int, end: int) -> tuple[str, str]:
    """Read a StringStringEntryProto and return its key and value."""
    texts = {STRING_STRING_ENTRY_KEY: "", STRING_STRING_ENTRY_VALUE: ""}
    while position < end:
        number, start, length = content.field_header(position, end)
        if number not in texts or length > MAX_METADATA_TEXT_BYTES:
            raise WireError
        position = start + length
        texts[number] = content.read(start, position).decode()
    return texts[STRING_STRING_ENTRY_KEY], texts[STRING_STRING_ENTRY_VALUE]
