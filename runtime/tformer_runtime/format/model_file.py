"""What can be told of a model file without loading it: that it is whole, its manifest, and where its weights lie.

An ONNX file is one protobuf message, ``ModelProto``, and its metadata are a few short fields beside the (large)
graph. Reading them by hand skips over the weights, needs no package, and tells a file that is damaged, foreign or too
new before onnxruntime spends time on it.

onnxruntime reads a message whole and copies each weight out of it, but weights that it is told to find in a file it
maps: then memory holds what it packs for its kernels, and of the rest the pages that are read. `mapped` tells it so of
the weights in the model file itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tformer_runtime.base.errors import ModelFileError
from tformer_runtime.format.manifest import KEY, Manifest
from tformer_runtime.format.onnx_wire import BYTES, VARINT, WireError, message, read_head, tag, varint

# The field numbers of onnx.proto's ModelProto
_IR_VERSION, _GRAPH, _METADATA = 1, 7, 14
_LAST_FIELD = 64  # ModelProto has a few dozen fields at most: a higher number is something else than ONNX
_LONGEST_ENTRY = 1 << 30
_INITIALIZER = 5  # of GraphProto
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14  # of TensorProto
_EXTERNAL = 1
_SMALL = 1024  # bytes; onnxruntime wants to see what sizes and shapes are made of
_ALIGNMENT = 64  # bytes; numbers that begin elsewhere are copied, for kernels read whole vectors


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
    with _opened(path) as (file, size):
        return _model_metadata(file, size)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its bytes' number; what goes wrong in reading it becomes a ModelFileError."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise ModelFileError(f"{name} does not exist") from error
    except IsADirectoryError as error:
        raise ModelFileError(f"{name} is a folder, not a model file") from error
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror or error}") from error
    except (WireError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{name} is not a whole ONNX file: it is something else, damaged or cut short") from error


def mapped(path: str | os.PathLike[str]) -> tuple[bytes, Path]:
    """The model with its large weights as references into the file, and the folder in which the file is.

    Time and memory: those of the model without its weights. ModelFileError as for `read_metadata`.
    """
    place = Path(path).resolve()  # onnxruntime follows no link out of the folder
    try:
        os.fspath(place).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"{place!r} is not a name in UTF-8, which onnxruntime needs: rename the file") from error
    with _opened(path) as (file, size):
        return _without_weights(file, size, (_GRAPH, _INITIALIZER), place.name), place.parent


def _without_weights(file: BinaryIO, end: int, way: tuple[int, ...], name: str) -> bytes:
    """The message that ends at `end`, copied; along the fields of `way` lie tensors, whose numbers stay in the file."""
    parts: list[bytes] = []
    while (begin := file.tell()) < end:
        number, length = _field(file, end)
        last = file.tell() + length
        if way and number == way[0]:
            inner = _without_weights(file, last, way[1:], name)
            parts += [tag(number, BYTES), varint(len(inner)), inner]
        elif not way and number == _RAW_DATA and length > _SMALL and file.tell() % _ALIGNMENT == 0:
            for key, value in (("location", name), ("offset", str(file.tell())), ("length", str(length))):
                entry = message(1, key.encode()) + message(2, value.encode())
                parts.append(message(_EXTERNAL_DATA, entry))
            parts += [tag(_DATA_LOCATION, VARINT), varint(_EXTERNAL)]
            file.seek(last)
        else:
            file.seek(begin)
            parts.append(file.read(last - begin))
    return b"".join(parts)


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
        raise WireError
    return metadata


def _entry(file: BinaryIO, end: int) -> tuple[str, str]:
    """A StringStringEntryProto: field 1 is the key, field 2 the value."""
    texts = {1: "", 2: ""}
    while file.tell() < end:
        number, length = _field(file, end)
        if number not in texts or length > _LONGEST_ENTRY:
            raise WireError
        texts[number] = file.read(length).decode()
    return texts[1], texts[2]


def _field(file: BinaryIO, end: int) -> tuple[int, int]:
    """As `read_head`, of a message of onnx.proto."""
    number, length = read_head(file, end)
    if number > _LAST_FIELD:
        raise WireError
    return number, length
