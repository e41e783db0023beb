"""Weights that a file derives from stored ones: computed by numpy before onnxruntime opens the file.

A file stores each matrix of integers once. Operators over constants, in front of the other nodes of a graph, make the
forms that kernels read (`tformer_export/quantize/weight_storage.py`). onnxruntime runs them when it opens a file. It
keeps all intermediate results until the last of them is computed, with up to six bytes a weight, and uses one core.

`with_derived_weights` finds these operators by the records of the products, writes their results into a scratch file on
all cores, matrix by matrix, and puts references to that file in their place. onnxruntime maps a weight, packs it for
its kernel, and then lets it go, so that never more than a few matrices are in memory twice.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.scratch_files import scratch_file
from tformer_runtime.format import weight_forms
from tformer_runtime.format.onnx_graph import (
    Graph,
    OnnxModel,
    Place,
    Tensor,
    add_reference,
    move_reference,
    parse_model,
    remove_unread,
    tensor_array,
)
from tformer_runtime.format.stored_forms import INT8_COLUMNS, StoredProducts
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.rewriting.product_rewrite import DAMAGE, PACKED_PRODUCT, PRODUCTS, UNPARSED_BRANCHES
from tformer_runtime.rewriting.stored_weights import Comparison, StoredWeights, read_rows_of_6_bits

logger = logging.getLogger("tformer")

MIN_DERIVED_BYTES = 1 << 20  # of a model: onnxruntime derives fewer in less time than a scratch file takes
MAX_GROWTH = 6  # derived numbers for each stored byte: two in a byte, in two graphs, and padded blocks
_DERIVING = (b"Transpose", b"BitwiseXor")  # a model without these operators derives nothing
_READING = tuple(name.encode() for name in (*PRODUCTS, PACKED_PRODUCT))  # nor does one without these
_KEY = b"location"  # of a reference to a file


class _UnexpectedError(Exception):
    """The model is not as the exporter writes it: it is left to onnxruntime."""


class _Derived(Struct, frozen=True):
    """A derived weight. source: the stored weight. write: fills the array; None if the weight is the stored one."""

    graph: Graph
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    source: Tensor
    write: Callable[[Array], None] | None


@contextlib.contextmanager
def with_derived_weights(
    model: bytes, folder: Path, threads: int, products: StoredProducts
) -> Iterator[tuple[bytes, Path]]:
    """Yield the model with its derived weights as references to a scratch file, and the folder of its references.

    model, folder: from `model_file.read_mapped_model`. They are yielded unchanged if there are no derived weights, or
        if there is no place for the scratch file; then onnxruntime derives them.
    threads: matrices that are computed at the same time.
    products: the records of the file.
    The scratch file has one byte for each derived number, and is deleted at the end of the block.
    """
    with contextlib.ExitStack() as stack:
        yield _derive(model, folder, threads, products, stack) or (model, folder)


def _derive(
    model: bytes, folder: Path, threads: int, products: StoredProducts, stack: contextlib.ExitStack
) -> tuple[bytes, Path] | None:
    """Compute the derived weights. Return as `with_derived_weights` yields; None to leave the model as it is."""
    if os.name != "posix":  # a path relative to the root of all files is not one on another drive
        return None
    if not products.products or not all(any(name in model for name in names) for names in (_DERIVING, _READING)):
        return None  # without parsing it
    if any(name in model for name in UNPARSED_BRANCHES):
        return None
    with contextlib.ExitStack() as scratch:
        try:
            result = _rewritten(model, folder, threads, products, scratch)
        except (_UnexpectedError, *DAMAGE):  # onnxruntime says what is wrong with it
            return None
        except (OSError, RuntimeError) as error:  # no place, or no thread
            logger.info("onnxruntime derives the weights itself: %s", error)
            return None
        if result is not None:
            stack.push(scratch.pop_all())
        return result


def _rewritten(
    model: bytes, folder: Path, threads: int, products: StoredProducts, stack: contextlib.ExitStack
) -> tuple[bytes, Path] | None:
    """Do as `_derive` does, with an error for a model that is left to onnxruntime."""
    parsed = parse_model(model)
    with WeightFiles(folder) as files:
        weights = list(
            {(id(each.graph), each.name): each for each in _find_derived(parsed.graph, products, files)}.values()
        )
        sizes = [math.prod(each.shape) if each.write else 0 for each in weights]
        if sum(sizes) < MIN_DERIVED_BYTES:
            return None
        if sum(sizes) > MAX_GROWTH * sum({each.source: each.source.byte_count for each in weights}.values()):
            raise _UnexpectedError
        _use_root(parsed, folder, files)
        *places, size = itertools.accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0)
        file, path = stack.enter_context(scratch_file(size))
        _write_all(weights, places, file, threads)
    _put_all(weights, places, path, folder)
    remove_unread(parsed.graph)
    encoded = parsed.encode()
    written = {(id(each.graph), each.name) for each in weights} | {
        (id(parsed.graph), n) for n in parsed.graph.initializers
    }
    locations = [
        tensor.location.encode()
        for graph in parsed.graph.all_graphs()
        for name, tensor in graph.initializers.items()
        if tensor.raw is None and tensor.location and (id(graph), name) in written
    ]
    if encoded.count(_KEY) != sum(1 + location.count(_KEY) for location in locations):
        raise _UnexpectedError  # onnxruntime would read a file that this module does not know
    return encoded, Path("/")


def _find_derived(graph: Graph, stored: StoredProducts, files: WeightFiles) -> Iterator[_Derived]:
    """Yield the derived weights that products read."""
    comparison = Comparison(files)
    for inner in graph.all_graphs():
        for node in inner.nodes:
            is_packed = node.op_type == PACKED_PRODUCT
            spec = stored.products.get(node.outputs[0]) if is_packed or node.op_type in PRODUCTS else None
            found = inner.find_producer(node.inputs[1]) if spec is not None else None
            if spec is None or found is None:
                continue
            name, matrix = node.inputs[1], stored.matrices[spec.matrix]
            find = comparison.find_packed if is_packed else comparison.find_columns
            weights = find(inner, name, matrix)
            is_stored = matrix.is_packed if is_packed else matrix.form == INT8_COLUMNS
            if weights is None or (is_stored and weights.tensor.raw is not None):
                continue
            shape: tuple[int, ...] = matrix.inner, matrix.columns
            if is_packed:
                shape = weights.tensor.shape if is_stored else (matrix.columns, matrix.blocks, matrix.block)
            write = None if is_stored else (_writer_of_blocks if is_packed else _writer_of_columns)(weights, files)
            dtype = np.dtype(np.uint8 if is_packed else np.int8)
            yield _Derived(found[1], name, dtype, shape, weights.tensor, write)


def _writer_of_blocks(stored: StoredWeights, files: WeightFiles) -> Callable[[Array], None]:
    """Return the function that writes packed weights (N, blocks, bytes of a block)."""
    values = _array(stored.tensor, files)

    def write(out: Array) -> None:
        rows = values if stored.lower is None else _rows_of_6_bits(stored, files)
        weight_forms.packed_8_bits(rows.T if stored.has_columns else rows, out)

    return write


def _writer_of_columns(stored: StoredWeights, files: WeightFiles) -> Callable[[Array], None]:
    """Return the function that writes int8 columns."""
    values = _array(stored.tensor, files)
    if stored.lower is not None:
        return lambda out: weight_forms.transpose(_rows_of_6_bits(stored, files), out)
    if stored.codes is not None:
        codes = _array(stored.codes, files)
        return lambda out: weight_forms.columns_of_4_bits(values, codes, out)
    if stored.is_raised:
        return lambda out: weight_forms.columns_of_8_bits(values, out)
    return lambda out: weight_forms.transpose(values, out)


def _rows_of_6_bits(stored: StoredWeights, files: WeightFiles) -> Array:
    rows = read_rows_of_6_bits(stored, files)
    if rows is None:
        raise _UnexpectedError
    return rows


def _array(tensor: Tensor, files: WeightFiles) -> Array:
    """Return the numbers of a stored weight. Raise _UnexpectedError if its file does not have them."""
    array = tensor_array(tensor, files.read)
    if array is None or not array.size:
        raise _UnexpectedError
    return array


def _use_root(model: OnnxModel, folder: Path, files: WeightFiles) -> None:
    """Let the references of weights have paths from the root, so that files of two folders can be read.

    Raise _UnexpectedError for a reference to another folder, which onnxruntime refuses, or to bytes that are not there.
    """
    for name, tensor in list(model.graph.initializers.items()):
        if tensor.raw is None and tensor.location:
            if not files.has(tensor):
                raise _UnexpectedError
            move_reference(model.graph, name, _from_root(folder / tensor.location))


def _put_all(weights: list[_Derived], places: list[int], scratch: Path, folder: Path) -> None:
    """Put references in the places of the nodes that derive the weights."""
    for graph in {id(each.graph): each.graph for each in weights}.values():
        names = {each.name for each in weights if each.graph is graph}
        graph.nodes = [node for node in graph.nodes if names.isdisjoint(node.outputs)]
        graph.index()
    for weight, place in zip(weights, places, strict=True):
        source = weight.source
        if weight.write is not None:
            where = Place(_from_root(scratch), place, math.prod(weight.shape))
        else:
            where = Place(_from_root(folder / source.location), source.offset, source.length)
        add_reference(weight.graph, weight.name, weight.dtype, weight.shape, where)


def _from_root(path: Path) -> str:
    return os.fspath(path).removeprefix("/")


def _write_all(weights: list[_Derived], places: list[int], file: BinaryIO, threads: int) -> None:
    """Compute all weights into the scratch file, the largest first."""
    from concurrent.futures import ThreadPoolExecutor  # takes 2 ms to import

    jobs = sorted(zip(weights, places, strict=True), key=lambda job: -math.prod(job[0].shape))
    jobs = [(weight, place) for weight, place in jobs if weight.write]
    size = math.prod(jobs[0][0].shape)
    buffers: SimpleQueue[Array] = SimpleQueue()
    for _ in range(threads):
        buffers.put(np.empty(size, np.uint8))
    with ThreadPoolExecutor(threads) as pool:
        for result in [pool.submit(_write, weight, file, place, buffers) for weight, place in jobs]:
            result.result()


def _write(weight: _Derived, file: BinaryIO, place: int, buffers: SimpleQueue[Array]) -> None:
    """Compute a weight in a buffer, and write it. In a mapped file each page would be a fault, which takes longer."""
    assert weight.write is not None
    buffer = buffers.get()
    try:
        rest = buffer[: math.prod(weight.shape)]
        weight.write(rest.view(weight.dtype).reshape(weight.shape))
        while rest.size:
            count = os.pwrite(file.fileno(), rest.data, place)
            rest, place = rest[count:], place + count
    finally:
        buffers.put(buffer)
