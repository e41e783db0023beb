"""Constants of a graph: initializers, and the nodes that compute with them alone."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.onnx_fields import (
    ATTRIBUTE_I,
    ATTRIBUTE_INTS,
    ATTRIBUTE_NAME,
    DATA_TYPE_INT8,
    DATA_TYPE_INT32,
    DATA_TYPE_INT64,
    DATA_TYPE_UINT8,
    GRAPH_INITIALIZER,
    NODE_ATTRIBUTE,
    NODE_INPUT,
    NODE_OP_TYPE,
    NODE_OUTPUT,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
    TENSOR_DATA_TYPE,
    TENSOR_DIMS,
    TENSOR_EXTERNAL_DATA,
    TENSOR_NAME,
    TENSOR_RAW_DATA,
)
from tformer_runtime.format.onnx_wire import Field, iter_fields, read_varint, varint_of

DTYPES: dict[int, np.dtype[np.generic]] = {  # TensorProto.DataType → numpy's type, of weights and shapes
    DATA_TYPE_UINT8: np.dtype(np.uint8),
    DATA_TYPE_INT8: np.dtype(np.int8),
    DATA_TYPE_INT32: np.dtype(np.int32),
    DATA_TYPE_INT64: np.dtype(np.int64),
}


class OtherFormError(Exception):
    """The operators or the constants are not those that the exporter writes: they are left to onnxruntime."""


@dataclass(frozen=True)
class Tensor:
    """An initializer.

    dtype: None for a type that is not in DTYPES.
    inline: its bytes, if they are in the model.
    file, offset, size: the name of the file with its bytes, and their place there, if they are not.
    """

    dtype: np.dtype[np.generic] | None
    shape: tuple[int, ...]
    inline: bytes = b""
    file: str = ""
    offset: int = 0
    size: int = 0

    def array(self, files: Mapping[str, mmap.mmap]) -> Array:
        """Return the values. Raise ValueError if there are fewer bytes than the shape has."""
        if self.dtype is None:
            raise OtherFormError
        if self.file and self.size != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError("a stored weight has another size than its shape")
        source, offset = (files[self.file], self.offset) if self.file else (self.inline, 0)
        return np.frombuffer(source, self.dtype, math.prod(self.shape), offset).reshape(self.shape)


@dataclass(frozen=True)
class Node:
    op: bytes
    inputs: tuple[bytes, ...]
    output: bytes
    attributes: tuple[bytes, ...]


class Scope:
    """The constants of a graph, and of the graphs around it: initializers, and nodes over constants by their output."""

    def __init__(self, fields: Sequence[Field], outer: Scope | None) -> None:
        """Make the scope of a graph without nodes. fields: of the graph."""
        self.outer, self._fields = outer, fields
        self.nodes: dict[bytes, Node] = {}
        self.small: dict[bytes, Array] = {}  # values of constants that were computed

    @functools.cached_property
    def initializers(self) -> dict[bytes, bytes]:
        """Name → TensorProto."""
        return {
            part.content: each.content
            for each in self._fields
            if each.number == GRAPH_INITIALIZER
            for part in iter_fields(each.content)
            if part.number == TENSOR_NAME
        }

    def is_constant(self, name: bytes) -> bool:
        here = name in self.initializers or name in self.nodes
        return here or (self.outer is not None and self.outer.is_constant(name))

    def tensor(self, name: bytes) -> Tensor:
        """Return an initializer. Raise _OtherForm for other values."""
        if name in self.initializers:
            return parse_tensor(self.initializers[name])
        if self.outer is None or name in self.nodes:
            raise OtherFormError
        return self.outer.tensor(name)

    def node(self, name: bytes) -> Node | None:
        """Return the node that computes a value; None for an initializer."""
        if name in self.nodes or name in self.initializers or self.outer is None:
            return self.nodes.get(name)
        return self.outer.node(name)


def parse_node(content: bytes) -> Node | None:
    """Return a node; None if it has other than one output, or no inputs."""
    inputs, outputs, attributes, op = [], [], [], b""
    for each in iter_fields(content):
        if each.number == NODE_INPUT:
            inputs.append(each.content)
        elif each.number == NODE_OUTPUT:
            outputs.append(each.content)
        elif each.number == NODE_OP_TYPE:
            op = each.content
        elif each.number == NODE_ATTRIBUTE:
            attributes.append(each.content)
    if len(outputs) != 1 or not inputs or not all(inputs):
        return None
    return Node(op, tuple(inputs), outputs[0], tuple(attributes))


def parse_tensor(content: bytes) -> Tensor:
    """Return an initializer. Raise OtherFormError if the place of its bytes is none."""
    dtype, shape, inline, place = 0, list[int](), b"", dict[bytes, bytes]()
    for each in iter_fields(content):
        if each.number == TENSOR_DIMS:
            shape += _numbers(each)
        elif each.number == TENSOR_DATA_TYPE:
            dtype = varint_of(each)
        elif each.number == TENSOR_RAW_DATA:
            inline = each.content
        elif each.number == TENSOR_EXTERNAL_DATA:
            entry = {part.number: part.content for part in iter_fields(each.content)}
            place[entry.get(STRING_STRING_ENTRY_KEY, b"")] = entry.get(STRING_STRING_ENTRY_VALUE, b"")
    try:
        file, offset, size = (
            place.get(b"location", b"").decode(),
            int(place.get(b"offset", 0)),
            int(place.get(b"length", 0)),
        )
    except ValueError as error:  # of a text too, which UnicodeDecodeError is a kind of
        raise OtherFormError from error
    if offset < 0:
        raise OtherFormError
    return Tensor(DTYPES.get(dtype), tuple(shape), inline, file, offset, size)


def int_attribute(node: Node, name: bytes) -> int | None:
    """Return an attribute that is a number; None if the node has none of this name."""
    for attribute in node.attributes:
        fields = {each.number: each for each in iter_fields(attribute)}
        if ATTRIBUTE_NAME in fields and fields[ATTRIBUTE_NAME].content == name and ATTRIBUTE_I in fields:
            value = varint_of(fields[ATTRIBUTE_I])
            return value - (1 << 64) if value >> 63 else value  # a negative number has 64 bits
    return None


def ints_attribute(node: Node, name: bytes) -> list[int]:
    """Return an attribute that is a list of numbers; empty if the node has none of this name."""
    for attribute in node.attributes:
        fields = list(iter_fields(attribute))
        if any(each.number == ATTRIBUTE_NAME and each.content == name for each in fields):
            return [number for each in fields if each.number == ATTRIBUTE_INTS for number in _numbers(each)]
    return []


def _numbers(each: Field) -> list[int]:
    """Return the numbers of a repeated field: one, or several that are packed."""
    if not each.content:
        return [varint_of(each)]
    numbers, position = [], 0
    while position < len(each.content):
        number, position = read_varint(each.content, position)
        numbers.append(number)
    return numbers
