"""A model as one ONNX file, one weight at a time, each where a runtime can map it into memory.

Serialising a whole `ModelProto` holds every weight twice more, as messages and as bytes. But protobuf merges a message
that comes in parts (https://protobuf.dev/programming-guides/encoding/#last-one-wins): so each weight is written as a
graph that holds nothing else, and the model without its weights comes last, which also tells a file that was cut short.
A weight's numbers begin at a multiple of 64 bytes, so that kernels can read them from the mapped file; a description of
the needed length, which the model's own replaces at the end, fills the gap before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from tformer_runtime.format.manifest import KEY, Manifest
from tformer_runtime.format.onnx_wire import BYTES, VARINT, message, tag, varint

LARGEST = 2 * 10**9  # bytes that one file holds; weights beyond go beside it
SMALL = 1024  # bytes; what is smaller stays in the model
ALIGNMENT = 64  # bytes; a cache line, and the widest vector

# Field numbers of onnx.proto
_IR_VERSION, _DESCRIPTION, _MODEL_GRAPH = 1, 6, 7  # of ModelProto
_GRAPH_INITIALIZER, _TENSOR_RAW = 5, 9


def save(model: ir.Model, manifest: Manifest, path: Path) -> Path:
    """Write the model with its manifest."""
    model.metadata_props[KEY] = manifest.to_json()
    write(model, path)
    return path


def write(model: ir.Model, path: Path) -> None:
    """Write the model; its weights go into `path`.data if they are beyond 2 GB. Memory: that of the largest weight.

    The model reads its large weights from the written file from then on, instead of holding them.
    """
    held = model.graph.initializers
    large = {n: v for n, v in held.items() if v.const_value is not None and v.const_value.nbytes > SMALL}
    beside = sum(_held(value).nbytes for value in large.values()) > LARGEST
    order = list(held.values())
    try:
        for name in large:
            held.pop(name)
        rest = ir.to_proto(model)
    finally:
        held.clear()
        held.update({str(value.name): value for value in order})
    file_of_weights = data_file(path) if beside else path
    places: dict[str, int] = {}
    with file_of_weights.open("wb") as file:
        if not beside:
            file.write(tag(_IR_VERSION, VARINT) + varint(model.ir_version))
        for name, value in large.items():
            if beside:
                file.write(bytes(-file.tell() % ALIGNMENT))
                places[name] = file.tell()
                rest.graph.initializer.append(_reference(value, file_of_weights.name, places[name]))
            else:
                places[name] = _write_head(file, value)
            file.write(_held(value).tobytes())
        if not beside:
            file.write(rest.SerializeToString() + message(_DESCRIPTION, (model.doc_string or "").encode()))
    if beside:
        path.write_bytes(rest.SerializeToString())
    for name, value in large.items():
        _read_from(file_of_weights, value, places[name])


@contextmanager
def removed(path: Path) -> Iterator[Path]:
    """A place for a model that is of no more use afterwards."""
    try:
        yield path
    finally:
        for file in (path, data_file(path)):
            file.unlink(missing_ok=True)


def data_file(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _held(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _shape(weight: ir.TensorProtocol) -> list[int]:
    return [size for size in weight.shape if isinstance(size, int)]  # all of them are


def _head(value: ir.Value) -> onnx.TensorProto:
    """The weight without its numbers."""
    weight = _held(value)
    return onnx.TensorProto(name=value.name, data_type=int(weight.dtype), dims=_shape(weight))


def _reference(value: ir.Value, location: str, offset: int) -> onnx.TensorProto:
    tensor = _head(value)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", offset), ("length", _held(value).nbytes)):
        tensor.external_data.add(key=key, value=str(text))
    return tensor


def _write_head(file: BinaryIO, value: ir.Value) -> int:
    """Everything of a weight that stands before its numbers, which begin at the returned offset."""
    length = _held(value).nbytes
    tensor = _head(value).SerializeToString() + tag(_TENSOR_RAW, BYTES) + varint(length)
    graph = tag(_GRAPH_INITIALIZER, BYTES) + varint(len(tensor) + length) + tensor
    model = tag(_MODEL_GRAPH, BYTES) + varint(len(graph) + length) + graph
    gap = -(file.tell() + len(model)) % ALIGNMENT
    if gap:
        gap += ALIGNMENT if gap == 1 else 0  # a description takes two bytes at least
        file.write(message(_DESCRIPTION, b" " * (gap - 2)))
    file.write(model)
    return file.tell()


def _read_from(path: Path, value: ir.Value, offset: int) -> None:
    """Let a weight be read from the file whenever it is asked for. One of a type that numpy has not stays as it is."""
    weight = _held(value)
    kind, shape = weight.dtype.numpy(), _shape(weight)
    if kind.isbuiltin == 1 and weight.nbytes == kind.itemsize * weight.size:
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(np.fromfile(path, kind, math.prod(shape), offset=offset).reshape(shape)),
            weight.dtype,
            ir.Shape(shape),
            name=str(value.name),
        )
