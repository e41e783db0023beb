"""Weights that a file derives from stored ones: computed by numpy before onnxruntime opens the file.

A file stores each matrix of integers once. Operators over constants, in front of the other nodes of a graph, make the
forms that kernels read (`tformer_export/quantize/weight_storage.py`). onnxruntime runs them when it opens a file. It
keeps all intermediate results until the last of them is computed, with up to six bytes a weight, and uses one core.

`with_derived_weights` recognises these operators, writes their results into a scratch file on all cores, matrix by
matrix, and puts references to that file in their place. onnxruntime maps a weight, packs it for its kernel, and then
lets it go, so that never more than one matrix is in memory twice.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.scratch_files import scratch_file
from tformer_runtime.format.constant_nodes import DTYPES, Node, OtherFormError, Scope, Tensor, parse_node, parse_tensor
from tformer_runtime.format.onnx_fields import (
    ATTRIBUTE_G,
    GRAPH_INITIALIZER,
    GRAPH_NODE,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
    TENSOR_DATA_LOCATION,
    TENSOR_DATA_LOCATION_EXTERNAL,
    TENSOR_DATA_TYPE,
    TENSOR_DIMS,
    TENSOR_EXTERNAL_DATA,
    TENSOR_NAME,
)
from tformer_runtime.format.onnx_wire import Field, WireError, bytes_field, iter_fields, varint_field
from tformer_runtime.format.weight_patterns import DerivedWeight, match_weight

logger = logging.getLogger("tformer")

MIN_DERIVED_BYTES = 1 << 20  # of a model: onnxruntime derives fewer in less time than a scratch file takes
MAX_GROWTH = 4  # derived numbers for each stored one: at most two in a byte, and a padded block
PLACE_BYTES = 1 << 16  # places in the scratch file are multiples of it: of a page, as large as pages are anywhere
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_OPERATORS = {  # of the nodes that derive weights
    *(b"Cast", b"BitwiseXor", b"Mul", b"Add", b"Gather", b"Transpose"),
    *(b"Reshape", b"Unsqueeze", b"Expand", b"Concat", b"Slice", b"Pad"),
}

# A StringStringEntryProto with the key "location". A varint may have more bytes than it needs.
_LOCATION = re.compile(rb"(?:\x0a|\x8a\x80*\x00)(?:\x08|\x88\x80*\x00)location")


@dataclass(frozen=True)
class _Reference:
    """An initializer whose bytes are in a file.

    fields: its encoded fields, without the place. file: None for the scratch file.
    """

    fields: tuple[bytes, ...]
    file: Path | None
    offset: int
    size: int

    def encoded(self, scratch: Path) -> bytes:
        place = {
            "location": os.fspath(self.file or scratch).removeprefix("/"),
            "offset": str(self.offset),
            "length": str(self.size),
        }
        entries = (
            bytes_field(STRING_STRING_ENTRY_KEY, key.encode()) + bytes_field(STRING_STRING_ENTRY_VALUE, value.encode())
            for key, value in place.items()
        )
        external = b"".join(bytes_field(TENSOR_EXTERNAL_DATA, entry) for entry in entries)
        return b"".join(self.fields) + external + varint_field(TENSOR_DATA_LOCATION, TENSOR_DATA_LOCATION_EXTERNAL)


# A message in parts: encoded fields, references, and fields that hold a message in parts, with their numbers.
_Parts = list["bytes | tuple[int, _Reference | _Parts]"]


@contextlib.contextmanager
def with_derived_weights(model: bytes, folder: Path, threads: int) -> Iterator[tuple[bytes, Path]]:
    """Yield the model with its derived weights as references to a scratch file, and the folder of its references.

    model, folder: from `model_file.read_mapped_model`. They are yielded unchanged if there are no derived weights, or
        if there is no place for the scratch file; then onnxruntime derives them.
    threads: matrices that are computed at the same time.
    The scratch file has one byte for each derived number, and is deleted at the end of the block.
    """
    with contextlib.ExitStack() as stack:
        yield _derive(model, folder, threads, stack) or (model, folder)


def _derive(model: bytes, folder: Path, threads: int, stack: contextlib.ExitStack) -> tuple[bytes, Path] | None:
    """Compute the derived weights. Return as `with_derived_weights` yields; None to leave the model as it is."""
    if os.name != "posix":  # a path relative to the root of all files is not one on another drive
        return None
    try:
        fields = list(iter_fields(model))
        graph = _Graph(b"".join(each.content for each in fields if each.number == MODEL_GRAPH), None)  # may be in parts
        if sum(math.prod(weight.shape) for weight in graph.all_weights()) < MIN_DERIVED_BYTES:
            return None
        plan = _Plan(folder)
        parts: _Parts = [_plain(each) for each in fields if each.number != MODEL_GRAPH]
        parts.append((MODEL_GRAPH, plan.parts(graph)))
        file, path = stack.enter_context(scratch_file(plan.size))
        plan.write(file, threads)
    except (OtherFormError, WireError, RecursionError):  # onnxruntime says what is wrong with it
        return None
    except (OSError, ValueError) as error:  # no place, or a stored weight that is shorter than its shape
        logger.info("onnxruntime derives the weights itself: %s", error)
        return None
    return _encode(parts, path), Path("/")


def _encode(parts: _Parts, scratch: Path) -> bytes:
    encoded = []
    for part in parts:
        if isinstance(part, bytes):
            encoded.append(part)
            continue
        number, content = part
        inner = content.encoded(scratch) if isinstance(content, _Reference) else _encode(content, scratch)
        encoded.append(bytes_field(number, inner))
    return b"".join(encoded)


class _Graph:
    """A graph, its derived weights, and the graphs within it.

    nodes: the nodes in front that derive weights, by their encoding.
    weights: the recognised weights by name. kept: names of the values that onnxruntime derives.
    inner: the graphs of attributes, by their encoding.
    """

    def __init__(self, content: bytes, outer: Scope | None) -> None:
        self.is_main = outer is None
        self.fields = list(iter_fields(content))
        scope = Scope(self.fields, outer)
        self.nodes = _derived_nodes(self.fields, scope)
        self.weights, self.kept = _match_all(self.nodes, scope)
        self.inner = {
            part.content: _Graph(part.content, scope)
            for node in self.fields
            if node.number == GRAPH_NODE and b"_branch" in node.content
            for attribute in iter_fields(node.content)
            if attribute.number == NODE_ATTRIBUTE
            for part in iter_fields(attribute.content)
            if part.number == ATTRIBUTE_G
        }

    def all_weights(self) -> Iterator[DerivedWeight]:
        yield from self.weights.values()
        for graph in self.inner.values():
            yield from graph.all_weights()


class _Plan:
    """The places of derived weights in the scratch file, and the model with references to them.

    folder: of the model file.
    size: of the scratch file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: list[tuple[DerivedWeight, int]] = []
        self.size = 0
        self._file_sizes: dict[str, int] = {}

    def parts(self, graph: _Graph) -> _Parts:
        """Return the parts of a graph. Raise OtherFormError if a reference into a file is where none is expected."""
        parts: _Parts = [(GRAPH_INITIALIZER, self._add(name, weight)) for name, weight in graph.weights.items()]
        for each in graph.fields:
            if each.number == GRAPH_NODE and each.encoded in graph.nodes:
                parts += [each.encoded] if graph.nodes[each.encoded].output in graph.kept else []
            elif each.number == GRAPH_NODE and b"_branch" in each.content:
                parts.append((GRAPH_NODE, self._choice(each.content, graph)))
            elif each.number == GRAPH_INITIALIZER and graph.is_main:
                parts.append(self._initializer(each))
            else:
                parts.append(_plain(each))
        return parts

    def _choice(self, node: bytes, graph: _Graph) -> _Parts:
        """Return the parts of a node with graphs as attributes."""
        parts: _Parts = []
        for each in iter_fields(node):
            if each.number == NODE_ATTRIBUTE:
                inner: _Parts = [
                    (ATTRIBUTE_G, self.parts(graph.inner[part.content])) if part.number == ATTRIBUTE_G else _plain(part)
                    for part in iter_fields(each.content)
                ]
                parts.append((NODE_ATTRIBUTE, inner))
            else:
                parts.append(_plain(each))
        return parts

    def _initializer(self, initializer: Field) -> bytes | tuple[int, _Reference]:
        """Return an initializer; if its bytes are in a file, with a path from the root."""
        if _LOCATION.search(initializer.content) is None:
            return initializer.encoded
        tensor = parse_tensor(initializer.content)
        self._check_place(tensor)
        place = TENSOR_EXTERNAL_DATA, TENSOR_DATA_LOCATION
        kept = tuple(each.encoded for each in iter_fields(initializer.content) if each.number not in place)
        return GRAPH_INITIALIZER, _Reference(kept, self.folder / tensor.file, tensor.offset, tensor.size)

    def _check_place(self, tensor: Tensor) -> None:
        """Raise OtherFormError if the bytes of a tensor are in another folder, or beyond the end of their file."""
        if tensor.file not in self._file_sizes:
            path = self.folder / tensor.file
            if path.parent != self.folder or path.name != tensor.file or path.is_symlink():
                raise OtherFormError  # onnxruntime refuses it
            self._file_sizes[tensor.file] = path.stat().st_size
        if tensor.offset + tensor.size > self._file_sizes[tensor.file]:
            raise OtherFormError

    def _add(self, name: bytes, weight: DerivedWeight) -> _Reference:
        """Return the reference to a weight, and give it a place in the scratch file if it has to be computed."""
        fields = (
            *(varint_field(TENSOR_DIMS, size) for size in weight.shape),
            varint_field(TENSOR_DATA_TYPE, _CODES[weight.dtype]),
            bytes_field(TENSOR_NAME, name),
        )
        for source in weight.sources:
            if source.file:
                self._check_place(source)
        if weight.write is None:
            (same,) = weight.sources
            return _Reference(fields, self.folder / same.file, same.offset, same.size)
        place, size = self.size, math.prod(weight.shape)
        if size > MAX_GROWTH * sum(math.prod(source.shape) for source in weight.sources):
            raise OtherFormError
        self.weights.append((weight, place))
        self.size += -(-size // PLACE_BYTES) * PLACE_BYTES
        return _Reference(fields, None, place, size)

    def write(self, file: BinaryIO, threads: int) -> None:
        """Compute all weights. Raise OSError or ValueError if a stored weight cannot be read."""
        from concurrent.futures import ThreadPoolExecutor  # takes 2 ms to import

        names = {tensor.file for weight, _ in self.weights for tensor in weight.sources if tensor.file}
        stored = {name: _mapped(self.folder / name) for name in names}
        with ThreadPoolExecutor(threads) as pool:
            largest_first = sorted(self.weights, key=lambda each: -math.prod(each[0].shape))
            results = [pool.submit(_write, weight, stored, file, place) for weight, place in largest_first]
            for result in results:
                result.result()


def _write(weight: DerivedWeight, stored: Mapping[str, mmap.mmap], file: BinaryIO, place: int) -> None:
    """Compute a weight into the scratch file."""
    assert weight.write is not None
    pages = mmap.mmap(file.fileno(), math.prod(weight.shape), offset=place)  # closed with the last array on it
    out: Array = np.frombuffer(pages, weight.dtype).reshape(weight.shape)
    weight.write(*(each.array(stored) for each in weight.sources), out)


def _mapped(path: Path) -> mmap.mmap:
    """Return the bytes of a file, which are mapped until the last array that shows them is gone."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _plain(each: Field) -> bytes:
    """Return the bytes of a field. Raise OtherFormError if it refers to a file: its folder would be another one."""
    if _LOCATION.search(each.content) is not None:
        raise OtherFormError
    return each.encoded


def _derived_nodes(fields: list[Field], scope: Scope) -> dict[bytes, Node]:
    """Return the nodes over constants in front of a graph, by their encoding. The scope gets all constants."""
    nodes: dict[bytes, Node] = {}
    for each in fields:
        if each.number != GRAPH_NODE:
            continue
        node = parse_node(each.content)
        if node is None or node.op not in _OPERATORS:
            break
        if not all(map(scope.is_constant, node.inputs)):
            break
        nodes[each.encoded] = scope.nodes[node.output] = node
    return nodes


def _match_all(nodes: Mapping[bytes, Node], scope: Scope) -> tuple[dict[bytes, DerivedWeight], set[bytes]]:
    """Return the derived weights by name, and the names of values that onnxruntime derives."""
    read = {name for node in nodes.values() for name in node.inputs}
    weights: dict[bytes, DerivedWeight] = {}
    kept, pending = set[bytes](), []
    for node in nodes.values():
        if node.output not in read:
            try:
                weights[node.output] = match_weight(scope, node)
            except (OtherFormError, ValueError, TypeError, IndexError):  # of numbers that do not fit each other
                pending.append(node.output)
    while pending:
        name = pending.pop()
        if name in scope.nodes and name not in kept:
            kept.add(name)
            pending += scope.nodes[name].inputs
    return weights, kept
