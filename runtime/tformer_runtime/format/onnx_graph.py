"""An ONNX model as nodes that can be replaced: a small part of the onnx package, for the rewriting of files at load.

A model is parsed once and encoded once. Nodes, weights and branches that nobody changes are kept as the bytes of the
file. Weights are references into files (`model_file.read_mapped_model`), so a model has some hundred kilobytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.onnx_fields import (
    ATTRIBUTE_F,
    ATTRIBUTE_G,
    ATTRIBUTE_I,
    ATTRIBUTE_INTS,
    ATTRIBUTE_NAME,
    ATTRIBUTE_S,
    ATTRIBUTE_TYPE,
    ATTRIBUTE_TYPE_FLOAT,
    ATTRIBUTE_TYPE_GRAPH,
    ATTRIBUTE_TYPE_INT,
    ATTRIBUTE_TYPE_STRING,
    DATA_TYPE_FLOAT,
    DATA_TYPE_INT8,
    DATA_TYPE_INT32,
    DATA_TYPE_INT64,
    DATA_TYPE_UINT8,
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    GRAPH_NODE,
    GRAPH_OUTPUT,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    NODE_DOMAIN,
    NODE_INPUT,
    NODE_OP_TYPE,
    NODE_OUTPUT,
    STRING_STRING_ENTRY_KEY,
    STRING_STRING_ENTRY_VALUE,
    TENSOR_DATA_LOCATION,
    TENSOR_DATA_LOCATION_EXTERNAL,
    TENSOR_DATA_TYPE,
    TENSOR_DIMS,
    TENSOR_EXTERNAL_DATA,
    TENSOR_NAME,
    TENSOR_RAW_DATA,
    VALUE_INFO_NAME,
)
from tformer_runtime.format.onnx_wire import WireError, bytes_field, iter_fields, tag, varint_field

DTYPES: dict[int, np.dtype[Any]] = {
    DATA_TYPE_FLOAT: np.dtype(np.float32),
    DATA_TYPE_INT8: np.dtype(np.int8),
    DATA_TYPE_UINT8: np.dtype(np.uint8),
    DATA_TYPE_INT32: np.dtype(np.int32),
    DATA_TYPE_INT64: np.dtype(np.int64),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
BRANCHING_OPERATORS = ("If", "Loop", "Scan")  # the standard operators with graphs of their own
MAX_DEPTH = 8  # of branches in branches
FIXED32 = 5  # the wire type of a float

Attribute = int | float | list[int]


class Place(NamedTuple):
    """The place of bytes in a file; the fields are the keys of TensorProto.external_data."""

    location: str
    offset: int
    length: int


class Tensor(Struct, frozen=True):
    """A weight.

    dtype: None for a type that this module does not know.
    raw: its bytes; None if they are elsewhere.
    location, offset, length: the place of the bytes in a file beside the model; length 0 if they are here.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    raw: bytes | None
    location: str = ""
    offset: int = 0
    length: int = 0

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype is not None else 0)


class Node(Struct, eq=False):
    """A node.

    encoded: its NodeProto; without its branches if it has any, and None once it has changed.
    branches: name of an attribute → its graph.
    known_attributes: what `attributes` returns; None before it is called.
    has_other_attributes: whether there are attributes that it does not return, once it was called.
    """

    op_type: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    encoded: bytes
    branches: dict[str, Graph] = field(default_factory=dict)
    known_attributes: dict[str, Attribute] | None = None
    has_other_attributes: bool = False

    __repr__ = object.__repr__

    def names_read(self) -> set[str]:
        """Return the names of the values that the node and its branches read."""
        names = {*self.inputs}
        for branch in self.branches.values():
            names |= branch.names_read()
        return names

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the attributes that are numbers or lists of integers. They are parsed once."""
        if self.known_attributes is None:
            found: dict[str, Attribute] = {}
            for value in iter_fields(self.encoded):
                if value.number == NODE_ATTRIBUTE:
                    name, number = _attribute(value.content)
                    if number is not None:
                        found[name] = number
                    else:
                        self.has_other_attributes = True
            self.known_attributes = found
        return self.known_attributes

    def number_attributes(self) -> dict[str, int | float]:
        """Return the attributes that are numbers."""
        return {name: value for name, value in self.attributes().items() if isinstance(value, int | float)}

    def attribute_names(self) -> list[str]:
        """Return the names of all attributes."""
        attributes = (value.content for value in iter_fields(self.encoded) if value.number == NODE_ATTRIBUTE)
        return [_text(attribute, ATTRIBUTE_NAME) for attribute in attributes]

    def text_attribute(self, name: str) -> str:
        """Return the text of an attribute; an empty one if the node lacks the attribute."""
        attributes = (value.content for value in iter_fields(self.encoded) if value.number == NODE_ATTRIBUTE)
        return next((_text(each, ATTRIBUTE_S) for each in attributes if _text(each, ATTRIBUTE_NAME) == name), "")


class Graph(Struct, eq=False):
    """A graph, or a branch of a node.

    rest: its other fields, encoded.
    producers: name of a value → the node that computes it, since `index` was called.
    """

    nodes: list[Node]
    initializers: dict[str, Tensor]
    encoded_initializers: dict[str, bytes]
    outputs: list[str]
    rest: list[bytes]
    parent: Graph | None = None
    producers: dict[str, Node] = field(default_factory=dict)

    def find_producer(self, name: str) -> tuple[Node, Graph] | None:
        """Return the node that computes a value, and its graph, here or around this graph."""
        graph: Graph | None = self
        while graph is not None:
            node = graph.producers.get(name)
            if node is not None:
                return node, graph
            graph = graph.parent
        return None

    def find_tensor(self, name: str) -> Tensor | None:
        """Return the weight of this name, here or around this graph."""
        graph: Graph | None = self
        while graph is not None:
            if name in graph.initializers:
                return graph.initializers[name]
            graph = graph.parent
        return None

    __repr__ = object.__repr__

    def input_names(self) -> set[str]:
        fields = (value for encoded in self.rest for value in iter_fields(encoded))
        return {_text(value.content, VALUE_INFO_NAME) for value in fields if value.number == GRAPH_INPUT}

    def index(self) -> None:
        """Note which node computes each value, after nodes have changed."""
        self.producers = {name: node for node in self.nodes for name in node.outputs if name}

    def replace_nodes(self, new_nodes: Mapping[int, Node | None]) -> None:
        """Put new nodes in the places of others. new_nodes: id of a node → the new one; None to remove it."""
        self.nodes = [new for node in self.nodes if (new := new_nodes.get(id(node), node)) is not None]
        self.index()

    def all_graphs(self) -> Iterator[Graph]:
        """Yield this graph, and the branches within it."""
        yield self
        for node in self.nodes:
            for branch in node.branches.values():
                yield from branch.all_graphs()

    def names_read(self) -> set[str]:
        """Return the names of the values that nodes and outputs read, here and in branches."""
        names = {*self.outputs}
        for node in self.nodes:
            names |= node.names_read()
        return names


class OnnxModel(Struct, eq=False):
    """A model. rest: its other fields, encoded."""

    graph: Graph
    rest: list[bytes]

    def encode(self) -> bytes:
        return b"".join([*self.rest, bytes_field(MODEL_GRAPH, _encode_graph(self.graph))])


def parse_model(model: bytes) -> OnnxModel:
    """Parse a ModelProto. Raise WireError if the bytes are not a model, or if a branch is too deep in others."""
    values = list(iter_fields(model))
    graph = b"".join(value.content for value in values if value.number == MODEL_GRAPH)  # parts of a message are merged
    return OnnxModel(_parse_graph(graph, None, 0), [v.encoded for v in values if v.number != MODEL_GRAPH])


def new_node(
    op_type: str, domain: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, int | float | str]
) -> Node:
    """Return a node with attributes that are numbers and texts."""
    parts = [bytes_field(NODE_INPUT, name.encode()) for name in inputs]
    parts += [bytes_field(NODE_OUTPUT, name.encode()) for name in outputs]
    parts += [bytes_field(NODE_OP_TYPE, op_type.encode()), bytes_field(NODE_DOMAIN, domain.encode())]
    numbers: dict[str, Attribute] = {}
    for name, value in attributes.items():
        content = bytes_field(ATTRIBUTE_NAME, name.encode())
        if isinstance(value, int):
            numbers[name] = value
            content += varint_field(ATTRIBUTE_I, value) + varint_field(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_INT)
        elif isinstance(value, str):
            content += bytes_field(ATTRIBUTE_S, value.encode())
            content += varint_field(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_STRING)
        else:
            encoded = struct.pack("<f", value)
            (numbers[name],) = struct.unpack("<f", encoded)
            content += tag(ATTRIBUTE_F, FIXED32) + encoded
            content += varint_field(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_FLOAT)
        parts.append(bytes_field(NODE_ATTRIBUTE, content))
    return Node(op_type, domain, list(inputs), list(outputs), b"".join(parts), known_attributes=numbers)


def rename_values(node: Node, new_names: dict[str, str]) -> None:
    """Rename the values that a node reads and computes, also in its branches."""
    if any(name in new_names for name in (*node.inputs, *node.outputs)):
        node.inputs = [new_names.get(name, name) for name in node.inputs]
        node.outputs = [new_names.get(name, name) for name in node.outputs]
        kept = [v.encoded for v in iter_fields(node.encoded) if v.number not in (NODE_INPUT, NODE_OUTPUT)]
        names = [bytes_field(NODE_INPUT, name.encode()) for name in node.inputs]
        names += [bytes_field(NODE_OUTPUT, name.encode()) for name in node.outputs]
        node.encoded = b"".join([*names, *kept])
    for branch in node.branches.values():
        for inner in branch.nodes:
            rename_values(inner, new_names)


def keep_results(node: Node, kept: list[bool]) -> None:
    """Remove results of an `If`, and the outputs of its branches in the same places. kept: for each result."""
    if all(kept):
        return
    node.outputs = list(compress(node.outputs, kept))
    fields = [value.encoded for value in iter_fields(node.encoded) if value.number != NODE_OUTPUT]
    node.encoded = b"".join([*fields, *(bytes_field(NODE_OUTPUT, name.encode()) for name in node.outputs)])
    for branch in node.branches.values():
        branch.outputs = list(compress(branch.outputs, kept))
        places = iter(kept)
        branch.rest = [field for field in branch.rest if not _is_output(field) or next(places)]


def _is_output(encoded: bytes) -> bool:
    return next(iter_fields(encoded)).number == GRAPH_OUTPUT


def remove_unread(graph: Graph) -> None:
    """Remove nodes and weights that nothing reads, here and in branches."""
    needed: set[str] = set()
    _keep_needed(graph, needed)
    for inner in graph.all_graphs():
        for name in [name for name in inner.initializers if name not in needed]:
            del inner.initializers[name], inner.encoded_initializers[name]


def needed_nodes(nodes: Sequence[Node], names: Iterable[str]) -> list[Node]:
    """Return the nodes that values depend on, in their order. names: of the values."""
    needed, kept = {*names}, []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            needed |= node.names_read() - {""}
            kept.append(node)
    return kept[::-1]


def _keep_needed(graph: Graph, needed: set[str]) -> None:
    """Keep the nodes whose results are needed, and add the names that they read to those needed."""
    needed.update(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
            for branch in node.branches.values():
                _keep_needed(branch, needed)
    graph.nodes = kept[::-1]
    graph.index()


def add_reference(graph: Graph, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], place: Place) -> None:
    """Add a weight whose bytes are in a file."""
    fields = [varint_field(TENSOR_DIMS, size) for size in shape]
    fields += [varint_field(TENSOR_DATA_TYPE, _CODES[dtype]), bytes_field(TENSOR_NAME, name.encode())]
    content = b"".join([*fields, _encode_place(place)])
    graph.initializers[name] = Tensor(name, dtype, shape, None, *place)
    graph.encoded_initializers[name] = bytes_field(GRAPH_INITIALIZER, content)


def move_reference(graph: Graph, name: str, location: str) -> None:
    """Change the file of a weight whose bytes are in a file."""
    tensor = graph.initializers[name]
    (initializer,) = iter_fields(graph.encoded_initializers[name])
    place = TENSOR_EXTERNAL_DATA, TENSOR_DATA_LOCATION
    kept = b"".join(value.encoded for value in iter_fields(initializer.content) if value.number not in place)
    graph.initializers[name] = replace(tensor, location=location)
    content = kept + _encode_place(Place(location, tensor.offset, tensor.length))
    graph.encoded_initializers[name] = bytes_field(GRAPH_INITIALIZER, content)


def _encode_place(place: Place) -> bytes:
    entries = (
        bytes_field(STRING_STRING_ENTRY_KEY, key.encode()) + bytes_field(STRING_STRING_ENTRY_VALUE, str(value).encode())
        for key, value in place._asdict().items()
    )
    external = b"".join(bytes_field(TENSOR_EXTERNAL_DATA, entry) for entry in entries)
    return external + varint_field(TENSOR_DATA_LOCATION, TENSOR_DATA_LOCATION_EXTERNAL)


def tensor_array(tensor: Tensor, read: Callable[[Tensor], Array]) -> Array | None:
    """Return the numbers of a weight; None for a type or a size that does not fit its bytes.

    read: returns the bytes of a weight in another file, uint8.
    """
    if tensor.dtype is None:
        return None
    raw = np.frombuffer(tensor.raw, np.uint8) if tensor.raw is not None else read(tensor)
    if raw.size != tensor.byte_count:
        return None
    array: Array = raw.view(tensor.dtype).reshape(tensor.shape)
    return array


def _parse_graph(content: bytes, parent: Graph | None, depth: int) -> Graph:
    if depth > MAX_DEPTH:
        raise WireError
    graph = Graph([], {}, {}, [], [], parent)
    for value in iter_fields(content):
        if value.number == GRAPH_NODE:
            graph.nodes.append(_parse_node(value.content, graph, depth))
        elif value.number == GRAPH_INITIALIZER:
            tensor = _parse_tensor(value.content)
            graph.initializers[tensor.name] = tensor
            graph.encoded_initializers[tensor.name] = value.encoded
        else:
            if value.number == GRAPH_OUTPUT:
                graph.outputs.append(_text(value.content, VALUE_INFO_NAME))
            graph.rest.append(value.encoded)
    graph.index()
    return graph


def _parse_node(content: bytes, graph: Graph, depth: int) -> Node:
    node = Node("", "", [], [], content)
    attributes, kept = [], []
    for value in iter_fields(content):
        if value.number == NODE_INPUT:
            node.inputs.append(value.content.decode())
        elif value.number == NODE_OUTPUT:
            node.outputs.append(value.content.decode())
        elif value.number == NODE_OP_TYPE:
            node.op_type = value.content.decode()
        elif value.number == NODE_DOMAIN:
            node.domain = value.content.decode()
        if value.number == NODE_ATTRIBUTE:
            attributes.append(value)
        else:
            kept.append(value.encoded)
    if node.op_type in BRANCHING_OPERATORS:
        for attribute in attributes:
            fields = {value.number: value for value in iter_fields(attribute.content)}
            if ATTRIBUTE_G in fields:
                name = fields[ATTRIBUTE_NAME].content.decode() if ATTRIBUTE_NAME in fields else ""
                node.branches[name] = _parse_graph(fields[ATTRIBUTE_G].content, graph, depth + 1)
            else:
                kept.append(attribute.encoded)
        node.encoded = b"".join(kept)
    return node


def _parse_tensor(content: bytes) -> Tensor:
    name, data_type, raw, is_external = "", 0, None, False
    shape: list[int] = []
    entries: dict[str, str] = {}
    for value in iter_fields(content):
        if value.number == TENSOR_NAME:
            name = value.content.decode()
        elif value.number == TENSOR_DATA_TYPE:
            data_type = value.varint
        elif value.number == TENSOR_DIMS:
            shape += value.varints()
        elif value.number == TENSOR_RAW_DATA:
            raw = value.content
        elif value.number == TENSOR_DATA_LOCATION:
            is_external = value.varint != 0
        elif value.number == TENSOR_EXTERNAL_DATA:
            texts = {part.number: part.content.decode() for part in iter_fields(value.content)}
            entries[texts.get(STRING_STRING_ENTRY_KEY, "")] = texts.get(STRING_STRING_ENTRY_VALUE, "")
    dtype = DTYPES.get(data_type)
    if not is_external:
        return Tensor(name, dtype if raw is not None else None, tuple(shape), raw)
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0"))
    except ValueError as error:
        raise WireError from error
    return Tensor(name, dtype, tuple(shape), None, entries.get("location", ""), offset, length)


def _encode_graph(graph: Graph) -> bytes:
    parts = []
    for node in graph.nodes:
        content = node.encoded
        for name, branch in node.branches.items():
            attribute = bytes_field(ATTRIBUTE_NAME, name.encode()) + bytes_field(ATTRIBUTE_G, _encode_graph(branch))
            content += bytes_field(NODE_ATTRIBUTE, attribute + varint_field(ATTRIBUTE_TYPE, ATTRIBUTE_TYPE_GRAPH))
        parts.append(bytes_field(GRAPH_NODE, content))
    return b"".join([*parts, *graph.encoded_initializers.values(), *graph.rest])


def _attribute(content: bytes) -> tuple[str, Attribute | None]:
    """Return the name of an attribute, and its number or list of integers; None for other types.

    A number that is 0 may be absent: writers of protobuf's third version leave it out. The type says what is meant.
    """
    name, kind = "", 0
    numbers: dict[int, int | float] = {ATTRIBUTE_TYPE_INT: 0, ATTRIBUTE_TYPE_FLOAT: 0.0}
    integers: list[int] = []
    for value in iter_fields(content):
        if value.number == ATTRIBUTE_NAME:
            name = value.content.decode()
        elif value.number == ATTRIBUTE_TYPE:
            kind = value.varint
        elif value.number == ATTRIBUTE_I:
            numbers[ATTRIBUTE_TYPE_INT] = value.signed
        elif value.number == ATTRIBUTE_F and len(value.content) == 4:
            numbers[ATTRIBUTE_TYPE_FLOAT] = struct.unpack("<f", value.content)[0]
        elif value.number == ATTRIBUTE_INTS:
            integers += [n - (1 << 64) if n >> 63 else n for n in value.varints()]
    return name, numbers.get(kind, integers or None)


def _text(content: bytes, number: int) -> str:
    """Return a text of a message: the last one, if a field is there several times, as protobuf has it."""
    texts = [value.content for value in iter_fields(content) if value.number == number]
    return texts[-1].decode() if texts else ""
