"""Writing of a model as one ONNX file, one weight at a time, each where a runtime can map it into memory.

Serialising a whole `ModelProto` holds every weight two more times, as messages and as bytes. Protobuf merges a message
that comes in parts (https://protobuf.dev/programming-guides/encoding/#last-one-wins). So each weight is written as a
graph that holds nothing else. The model without its weights comes last, so that a truncated file is detected. The
numbers of a weight begin at a multiple of 64 bytes, so that kernels can read them from the mapped file. A description
of the needed length fills the gap before them, and the model's own description at the end replaces it. The file ends
with the digest of all bytes before it (`format.digest`).

A quantised product is described on its MatMul operator. Its record is made when the file is written, because rewrites
may still rename its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from msgspec import structs

from tformer_runtime.format.digest import DIGEST_KEY, WEIGHTS_DIGEST_KEY, Digest, digest_entry, weights_entry
from tformer_runtime.format.manifest import MANIFEST_KEY, Manifest
from tformer_runtime.format.model_file import MAX_INLINE_BYTES, WEIGHT_ALIGNMENT_BYTES
from tformer_runtime.format.onnx_fields import (
    GRAPH_INITIALIZER,
    MODEL_DOC_STRING,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    TENSOR_RAW_DATA,
)
from tformer_runtime.format.onnx_wire import BYTES, bytes_field, tag, varint, varint_field
from tformer_runtime.format.stored_forms import INT8_ROWS, MatrixSpec, ProductSpec, RowScaling, StoredProducts

_PRODUCT = "tformer.product"  # in the metadata of a node, which a file does not store
MAX_FILE_BYTES = 2 * 10**9  # bytes of one file; larger weights go into a second file


def save(model: ir.Model, manifest: Manifest, path: Path) -> Path:
    """Write the model with its manifest, to which the records of described products are added, and return the path."""
    stored = collect_products(model)
    if stored.products:
        manifest = structs.replace(manifest, stored_products=stored)
    model.metadata_props[MANIFEST_KEY] = manifest.to_json()
    write(model, path)
    return path


@dataclass(frozen=True)
class DescribedProduct:
    """The record of a product, without the names of its results.

    source, scale, bias: as in `ProductSpec`. A value that takes the place of the source takes its name too.
    followers: the number of nodes from its MatMul operator to its result.
    """

    matrix: MatrixSpec
    source: str
    scale: str
    bias: str | None = None
    scaling: RowScaling | None = None
    followers: int = 0


def describe_product(node: ir.Node, product: DescribedProduct) -> None:
    """Describe the product of a MatMul operator."""
    node.meta[_PRODUCT] = product


def copy_product(node: ir.Node, copy: ir.Node) -> None:
    """Describe the copy of a node, with the same inputs, and with copies of the nodes behind it."""
    if _PRODUCT in node.meta:
        copy.meta[_PRODUCT] = node.meta[_PRODUCT]


def describe_rows(node: ir.Node, name: str) -> None:
    """Say that the columns of a described product are the transpose of a constant of this name."""
    if _PRODUCT in node.meta:
        product: DescribedProduct = node.meta[_PRODUCT]
        matrix = product.matrix
        rows = MatrixSpec(INT8_ROWS, matrix.inner, matrix.columns, matrix.block, name)
        node.meta[_PRODUCT] = replace(product, matrix=rows)


def collect_products(model: ir.Model) -> StoredProducts:
    """Return the records of all described products."""
    matrices: dict[MatrixSpec, int] = {}
    products = {}
    for node in model.graph.all_nodes():
        if _PRODUCT not in node.meta:
            continue
        described: DescribedProduct = node.meta[_PRODUCT]
        result = node.outputs[0]
        for _ in range(described.followers):
            (use,) = result.uses()
            result = use.node.outputs[0]
        products[str(node.outputs[0].name)] = ProductSpec(
            matrices.setdefault(described.matrix, len(matrices)),
            described.source,
            str(result.name),
            described.scale,
            described.bias,
            described.scaling,
        )
    return StoredProducts(tuple(matrices), products)


def write(model: ir.Model, path: Path) -> None:
    """Write the model; weights of more than 2 GB go into `path`.data. Memory: that of the largest weight.

    Afterwards the model reads its large weights from the written file instead of holding them. Raises OSError with the
    name of the file if it cannot be written.
    """
    try:
        _write(model, path)
    except OSError as error:  # of writing, which does not name the file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write(model: ir.Model, path: Path) -> None:
    initializers = model.graph.initializers
    large = {
        n: v for n, v in initializers.items() if v.const_value is not None and v.const_value.nbytes > MAX_INLINE_BYTES
    }
    is_split = sum(_tensor_of(value).nbytes for value in large.values()) > MAX_FILE_BYTES
    order = list(initializers.values())
    try:
        for name in large:
            initializers.pop(name)
        rest = ir.to_proto(model)
    finally:
        initializers.clear()
        initializers.update({str(value.name): value for value in order})
    entries = [entry for entry in rest.metadata_props if entry.key not in (DIGEST_KEY, WEIGHTS_DIGEST_KEY)]
    del rest.metadata_props[:]  # a model that was read from a file has the digests of that file
    rest.metadata_props.extend(entries)
    file_of_weights = data_file(path) if is_split else path
    places: dict[str, int] = {}
    with _HashingFile(file_of_weights) as file:
        if not is_split:
            file.write(varint_field(MODEL_IR_VERSION, model.ir_version))
        for name, value in large.items():
            if is_split:
                file.write(bytes(-file.tell() % WEIGHT_ALIGNMENT_BYTES))
                places[name] = file.tell()
                rest.graph.initializer.append(_reference(value, file_of_weights.name, places[name]))
            else:
                places[name] = _write_head(file, value)
            file.write(_tensor_of(value).tobytes())
        if not is_split:
            file.write(rest.SerializeToString() + bytes_field(MODEL_DOC_STRING, (model.doc_string or "").encode()))
            file.write(digest_entry(file.digest))
    if is_split:
        with _HashingFile(path) as model_file:
            model_file.write(rest.SerializeToString() + weights_entry(file.digest, file_of_weights.name))
            model_file.write(digest_entry(model_file.digest))
    for name, value in large.items():
        _read_from(file_of_weights, value, places[name])


class _HashingFile:
    """A file to write, and the digest of its bytes."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("wb"), Digest()

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)

    def tell(self) -> int:
        return self._file.tell()

    @property
    def digest(self) -> str:
        """The digest of all that was written."""
        return self._digest.hexdigest()


@contextmanager
def temporary_model(path: Path) -> Iterator[Path]:
    """Delete the files of a model after the `with` block."""
    try:
        yield path
    finally:
        for file in (path, data_file(path)):
            file.unlink(missing_ok=True)


def data_file(path: Path) -> Path:
    """Return the path of the weights that do not fit into the file itself."""
    return path.with_name(path.name + ".data")


def _tensor_of(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _shape(weight: ir.TensorProtocol) -> list[int]:
    return [size for size in weight.shape if isinstance(size, int)]  # all sizes of a weight are numbers


def _head(value: ir.Value) -> onnx.TensorProto:
    """Return the message of a weight without its numbers."""
    weight = _tensor_of(value)
    return onnx.TensorProto(name=value.name, data_type=int(weight.dtype), dims=_shape(weight))


def _reference(value: ir.Value, location: str, offset: int) -> onnx.TensorProto:
    tensor = _head(value)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", offset), ("length", _tensor_of(value).nbytes)):
        tensor.external_data.add(key=key, value=str(text))
    return tensor


def _write_head(file: _HashingFile, value: ir.Value) -> int:
    """Write the message of a weight up to its numbers, and return the offset at which they begin."""
    length = _tensor_of(value).nbytes
    tensor = _head(value).SerializeToString() + tag(TENSOR_RAW_DATA, BYTES) + varint(length)
    graph = tag(GRAPH_INITIALIZER, BYTES) + varint(len(tensor) + length) + tensor
    model = tag(MODEL_GRAPH, BYTES) + varint(len(graph) + length) + graph
    gap = -(file.tell() + len(model)) % WEIGHT_ALIGNMENT_BYTES
    if gap:
        gap += WEIGHT_ALIGNMENT_BYTES if gap == 1 else 0  # a description takes two bytes at least
        file.write(bytes_field(MODEL_DOC_STRING, b" " * (gap - 2)))
    file.write(model)
    return file.tell()


def _read_from(path: Path, value: ir.Value, offset: int) -> None:
    """Replace a weight by one that is read from the file on each access. A dtype that numpy lacks stays in memory."""
    weight = _tensor_of(value)
    kind, shape = weight.dtype.numpy(), _shape(weight)
    if kind.isbuiltin == 1 and weight.nbytes == kind.itemsize * weight.size:
        value.const_value = ir.LazyTensor(
            lambda: ir.tensor(np.fromfile(path, kind, math.prod(shape), offset=offset).reshape(shape)),
            weight.dtype,
            ir.Shape(shape),
            name=str(value.name),
        )
