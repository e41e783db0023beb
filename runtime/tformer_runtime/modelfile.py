"""What can be told of a model file without loading it: that it is whole, and its manifest.

An ONNX file is one protobuf message, ``ModelProto``, and its metadata are a few short fields beside the (large)
graph. Reading them by hand skips over the weights, needs no package, and tells a file that is damaged, foreign or too
new before onnxruntime spends time on it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from tformer_runtime.errors import ModelFileError
from tformer_runtime.manifest import KEY, Manifest

# https://protobuf.dev/programming-guides/encoding, and the field numbers of onnx.proto's ModelProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_IR_VERSION, _GRAPH, _METADATA = 1, 7, 14
_LAST_FIELD = 64  # ModelProto has a few dozen fields at most: a higher number is something else than ONNX
_LONGEST_ENTRY = 1 << 30


class _NotOnnxError(Exception):
    """The bytes are not a ModelProto, or end too early."""


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a model file; ModelFileError if the file is none of ours, damaged, or newer than this runtime."""
    metadata = read_metadata(path)
    if KEY not in metadata:
        raise ModelFileError(f"{os.fspath(path)} has no tformer manifest: export the model with tformer-export")
    try:
        return Manifest.from_json(metadata[KEY])
    except ModelFileError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata_props of an ONNX file. ModelFileError if it cannot be read or is not a whole ONNX file."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            return _model_metadata(file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError as error:
        raise ModelFileError(f"{name} does not exist") from error
    except IsADirectoryError as error:
        raise ModelFileError(f"{name} is a folder, not a model file") from error
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror or error}") from error
    except (_NotOnnxError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name} is not a whole ONNX file: it is something else, damaged or cut short") from error


def _model_metadata(file: BinaryIO, size: int) -> dict[str, str]:
    metadata: dict[str, str] = {}
    seen: set[int] = set()
    while file.tell() < size:
        number, length = _field(file, size)
        seen.add(number)
        if number == _METADATA:
            key, value = _entry(file, file.tell() + length)
            metadata[key] = value
        else:
            file.seek(length, os.SEEK_CUR)
    if not {_IR_VERSION, _GRAPH} <= seen:
        raise _NotOnnxError
    return metadata


def _entry(file: BinaryIO, end: int) -> tuple[str, str]:
    """A StringStringEntryProto: field 1 is the key, field 2 the value."""
    texts = {1: "", 2: ""}
    while file.tell() < end:
        number, length = _field(file, end)
        if number not in texts or length > _LONGEST_ENTRY:
            raise _NotOnnxError
        texts[number] = file.read(length).decode()
    return texts[1], texts[2]


def _field(file: BinaryIO, end: int) -> tuple[int, int]:
    """Read a field's head: its number, and how many bytes of content follow (none for numbers, read already)."""
    tag = _varint(file)
    number, kind = tag >> 3, tag & 7
    length = {_VARINT: 0, _FIXED64: 8, _FIXED32: 4}.get(kind, -1)
    if kind == _VARINT:
        _varint(file)
    elif kind == _BYTES:
        length = _varint(file)
    if not 0 < number <= _LAST_FIELD or length < 0 or file.tell() + length > end:
        raise _NotOnnxError
    return number, length


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise _NotOnnxError
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise _NotOnnxError
