"""The integer weights of a product as they are stored: int8 columns, rows of a table, or packed in 8, 6 or 4 bits.

A file holds each matrix once and derives other forms by a few operators over constants at the top of a graph
(`tformer_export/quantize/weight_storage.py`). This module recognises these operators, so that a kernel can read the
stored form.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tformer_runtime.base.arrays import Array
from tformer_runtime.format.onnx_fields import DATA_TYPE_INT8, DATA_TYPE_INT32, DATA_TYPE_UINT8, NODE_ATTRIBUTE
from tformer_runtime.format.onnx_graph import Attribute, Graph, Node, Tensor, tensor_array
from tformer_runtime.format.onnx_wire import iter_fields
from tformer_runtime.format.weight_files import WeightFiles
from tformer_runtime.format.weight_forms import MIDDLE, decode, rows_of_6_bits, tables_of_6_bits

MAX_TABLE_VALUES = 1 << 17  # of the table that unpacks 4 bits
BYTE_VALUES = 256
VALUES_OF_LOWER = 4  # of a byte of the lower plane of 6 bits
MAX_DEPTH, MAX_INPUTS = 16, 4  # of the nodes that compute that table
_ARITHMETIC = {"Mul": np.multiply, "Sub": np.subtract, "Div": np.floor_divide}
_SHAPING = ("Unsqueeze", "Expand", "Concat", "Reshape", "Cast", *_ARITHMETIC)


class StoredWeights(Struct, frozen=True):
    """Integer weights (K, N).

    tensor: int8 (K, N); int8 (N, K) if `is_transposed`; packed uint8 (N, blocks, block · bits / 8) if `block`.
    codes: of the blocks of 4 bits (`weight_forms.decode`), uint8 (N, blocks); else None.
    lower: of 6 bits (`weight_forms.rows_of_6_bits`), the plane of the lower 2; `tensor` is that of the upper 4, and
        `is_transposed`.
    inner: K, without the rows that pad it to whole blocks.
    """

    tensor: Tensor
    inner: int
    columns: int
    is_transposed: bool = False
    block: int = 0
    codes: Tensor | None = None
    lower: Tensor | None = None

    @property
    def bits(self) -> int:
        """Return the bits that kernels read: 6 are unpacked to 8 first."""
        return 8 if self.codes is None else 4

    @property
    def is_plain(self) -> bool:
        """Whether the stored form is int8 (K, N) itself."""
        return not self.is_transposed and not self.block

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.tensor, self.codes, self.lower) if tensor is not None]


def find_stored_weights(graph: Graph, name: str, files: WeightFiles) -> StoredWeights | None:
    """Return the stored form of the int8 value (K, N) of this name; None for other values.

    The weights have as many bytes as their shapes say.
    """
    return _whole(_find_columns(graph, name, files), files)


def _whole(stored: StoredWeights | None, files: WeightFiles) -> StoredWeights | None:
    """Return weights if their bytes are there; else None."""
    return stored if stored is not None and all(files.is_whole(tensor) for tensor in stored.tensors) else None


def _find_columns(graph: Graph, name: str, files: WeightFiles) -> StoredWeights | None:
    tensor = graph.find_tensor(name)
    if tensor is not None:
        return _plain(tensor)
    found = graph.find_producer(name)
    if found is None:
        return None
    node, home = found
    if is_operator(node, "Concat", 1):
        return _plain(home.find_tensor(node.inputs[0]))
    if not is_operator(node, "Transpose", 1) or node.attributes() != {"perm": [1, 0]}:
        return None
    return _find_rows(home, node.inputs[0], files)


def _plain(tensor: Tensor | None) -> StoredWeights | None:
    """Return a weight as columns (K, N) that are stored as they are; None for other types."""
    if tensor is None or tensor.dtype != np.int8 or len(tensor.shape) != 2:
        return None
    inner, columns = tensor.shape
    return StoredWeights(tensor, inner, columns)


def read_rows_of_6_bits(stored: StoredWeights, files: WeightFiles) -> Array | None:
    """Return the int8 rows (N, K) of weights of 6 bits; None if the file does not have them."""
    planes = [tensor_array(tensor, files.read) for tensor in stored.tensors]
    upper, lower = planes
    if upper is None or lower is None:
        return None
    rows = np.empty((stored.columns, stored.inner), np.int8)
    rows_of_6_bits(upper, lower, rows)
    return rows


def find_packed_weights(graph: Graph, name: str, files: WeightFiles) -> tuple[StoredWeights, int] | None:
    """Return the stored form of packed weights of this name, and the numbers of a block; None for other values.

    They are uint8 (N, blocks, bytes of a block), as MatMulNBits reads them, and have one of these forms:
        Concat(stored)                                    a name of its own for a stored weight
        Reshape([Pad](BitwiseXor(Cast(rows), 128)))       of 8 bits, from int8 (N, K), the transpose of int8 (K, N), or
                                                          6 bits
    """
    found = graph.find_producer(name)
    if found is None:
        return None
    node, home = found
    if is_operator(node, "Concat", 1):
        tensor = home.find_tensor(node.inputs[0])
        if tensor is None or tensor.dtype != np.uint8 or len(tensor.shape) != 3:
            return None
        columns, blocks, size = tensor.shape
        stored = _whole(StoredWeights(tensor, blocks * size, columns, block=size), files)
        return (stored, size) if stored is not None else None
    if not is_operator(node, "Reshape", 2):
        return None
    sizes, above, padding = _integers(home, node.inputs[1], files), _node(home, node.inputs[0]), 0
    if above is not None and is_operator(above, "Pad", 3):
        pads, filling = (_integers(home, each, files) for each in above.inputs[1:])
        if pads is None or len(pads) != 4 or pads[:3] != [0, 0, 0] or filling != [MIDDLE] or _has_attributes(above):
            return None
        padding = pads[3]
        above = _node(home, above.inputs[0])
    if above is None or not is_operator(above, "BitwiseXor", 2) or _integers(home, above.inputs[1], files) != [MIDDLE]:
        return None
    cast = _node(home, above.inputs[0])
    if cast is None or not is_operator(cast, "Cast", 1) or cast.attributes() != {"to": DATA_TYPE_UINT8}:
        return None
    stored = _whole(_find_int8(home, cast.inputs[0], files), files)
    if stored is None or sizes is None or len(sizes) != 3 or sizes[:2] != [stored.columns, -1] or sizes[2] < 1:
        return None
    return (stored, sizes[2]) if padding == -stored.inner % sizes[2] else None


def _find_int8(graph: Graph, name: str, files: WeightFiles) -> StoredWeights | None:
    """Return the stored form of the int8 value (N, K) of this name: as it is, the transpose of a weight, or 6 bits."""
    tensor, is_transposed = graph.find_tensor(name), True
    if tensor is None:
        rows = _find_rows(graph, name, files)
        if rows is not None and rows.lower is not None:
            return rows
        node = _node(graph, name)
        if node is None or not is_operator(node, "Transpose", 1) or node.attributes() != {"perm": [1, 0]}:
            return None
        tensor, is_transposed = graph.find_tensor(node.inputs[0]), False
    if tensor is None or tensor.dtype != np.int8 or len(tensor.shape) != 2:
        return None
    columns, inner = tensor.shape if is_transposed else tensor.shape[::-1]
    return StoredWeights(tensor, inner, columns, is_transposed)


def _find_rows(graph: Graph, name: str, files: WeightFiles) -> StoredWeights | None:
    """Return the stored form of the int8 value (N, K) of this name."""
    tensor = graph.find_tensor(name)
    if tensor is not None:
        if tensor.dtype != np.int8 or len(tensor.shape) != 2:
            return None
        return StoredWeights(tensor, tensor.shape[1], tensor.shape[0], is_transposed=True)
    node = _node(graph, name)
    inner: int | None = None
    if node is not None and is_operator(node, "Slice", 4):
        begin, end, axis = (_integers(graph, name, files) for name in node.inputs[1:])
        if begin != [0] or axis != [1] or end is None or len(end) != 1:
            return None
        inner, node = end[0], _node(graph, node.inputs[0])
    if node is not None and is_operator(node, "BitwiseOr", 2):
        stored = _planes_of_6(graph, node, files)
    else:
        stored = _find_reshaped(graph, node, files)
    if stored is None:
        return None
    inner = stored.inner if inner is None else inner
    filled = stored.block if stored.lower is None else VALUES_OF_LOWER
    return replace(stored, inner=inner) if stored.inner - filled < inner <= stored.inner else None


def _find_reshaped(graph: Graph, node: Node | None, files: WeightFiles) -> StoredWeights | None:
    """Recognise the rows (N, K) of packed weights."""
    above = _reshaped_rows(graph, node, files)
    if above is None:
        return None
    stored = _packed_8(graph, above[0], files) if above[0].op_type == "Cast" else _packed_4(graph, above[0], files)
    return stored if stored is not None and stored.columns == above[1] else None


def _reshaped_rows(graph: Graph, node: Node | None, files: WeightFiles) -> tuple[Node, int] | None:
    """Recognise a Reshape to (N, −1); return the node above it and N."""
    if node is None or not is_operator(node, "Reshape", 2):
        return None
    sizes, above = _integers(graph, node.inputs[1], files), _node(graph, node.inputs[0])
    if above is None or sizes is None or len(sizes) != 2 or sizes[1] != -1:
        return None
    return above, sizes[0]


def _planes_of_6(graph: Graph, node: Node, files: WeightFiles) -> StoredWeights | None:
    """Recognise BitwiseOr of two planes, each Reshape(Gather(table, Cast(plane)))."""
    planes = []
    for name, table in zip(node.inputs, tables_of_6_bits(), strict=True):
        above = _reshaped_rows(graph, _node(graph, name), files)
        if above is None or not is_operator(above[0], "Gather", 2) or above[0].attributes().get("axis", 0) != 0:
            return None
        values, place = above[0].inputs
        cast = _node(graph, place)
        if cast is None or not is_operator(cast, "Cast", 1) or cast.attributes() != {"to": DATA_TYPE_INT32}:
            return None
        plane, found = graph.find_tensor(cast.inputs[0]), graph.find_tensor(values)
        if plane is None or plane.dtype != np.uint8 or len(plane.shape) != 2 or plane.shape[0] != above[1]:
            return None
        if found is None or found.byte_count > table.nbytes or found.dtype != np.int8:
            return None
        numbers = tensor_array(found, files.read)
        if numbers is None or not np.array_equal(numbers, table):
            return None
        planes.append(plane)
    upper, lower = planes
    if upper.shape != (lower.shape[0], 2 * lower.shape[1]):
        return None
    count = VALUES_OF_LOWER * lower.shape[1]
    return StoredWeights(upper, count, upper.shape[0], is_transposed=True, lower=lower)


def _packed_8(graph: Graph, cast: Node, files: WeightFiles) -> StoredWeights | None:
    """Recognise Cast(BitwiseXor(stored, 128)) to int8."""
    flip = _node(graph, cast.inputs[0])
    if cast.attributes() != {"to": DATA_TYPE_INT8} or flip is None or not is_operator(flip, "BitwiseXor", 2):
        return None
    tensor, middle = graph.find_tensor(flip.inputs[0]), _integers(graph, flip.inputs[1], files)
    if tensor is None or tensor.dtype != np.uint8 or len(tensor.shape) != 3 or middle != [MIDDLE]:
        return None
    columns, blocks, block = tensor.shape
    return StoredWeights(tensor, blocks * block, columns, block=block)


def _packed_4(graph: Graph, gather: Node, files: WeightFiles) -> StoredWeights | None:
    """Recognise Gather(pairs, Cast(stored) + Unsqueeze(256 · Cast(codes)))."""
    if not is_operator(gather, "Gather", 2) or gather.attributes().get("axis", 0) != 0:
        return None
    place = _node(graph, gather.inputs[1])
    if place is None or not is_operator(place, "Add", 2):
        return None
    byte, begin = (_node(graph, name) for name in place.inputs)
    if byte is None or begin is None or not is_operator(byte, "Cast", 1) or not is_operator(begin, "Unsqueeze", 2):
        return None
    first = _node(graph, begin.inputs[0])
    if first is None or not is_operator(first, "Mul", 2) or _integers(graph, begin.inputs[1], files) != [-1]:
        return None
    code = _node(graph, first.inputs[0])
    if code is None or not is_operator(code, "Cast", 1):
        return None
    casts = [node.attributes() == {"to": DATA_TYPE_INT32} for node in (byte, code)]
    if not all(casts) or _integers(graph, first.inputs[1], files) != [BYTE_VALUES]:
        return None
    tensor, codes = graph.find_tensor(byte.inputs[0]), graph.find_tensor(code.inputs[0])
    if tensor is None or codes is None or tensor.dtype != np.uint8 or codes.dtype != np.uint8:
        return None
    if len(tensor.shape) != 3 or codes.shape != tensor.shape[:2]:
        return None
    if not _unpacks_pairs(evaluate(graph, gather.inputs[0], files)):
        return None
    columns, blocks, half = tensor.shape
    return StoredWeights(tensor, blocks * half * 2, columns, block=2 * half, codes=codes)


def _unpacks_pairs(table: Array | None) -> bool:
    """Return whether row 256 · code + byte of a table holds both weights of the byte in a block with this code."""
    if table is None or table.shape != (BYTE_VALUES**2, 2):
        return False
    return np.array_equal(table, _pairs_table())


@cache
def _pairs_table() -> Array:
    byte = np.arange(BYTE_VALUES, dtype=np.uint8)
    m, shift = (values.astype(int)[:, None, None] for values in decode(byte))
    table: Array = (m * np.stack([byte % 16, byte // 16], 1) - shift).reshape(-1, 2).astype(np.int8)
    return table


def evaluate(
    graph: Graph, name: str, files: WeightFiles, known: dict[str, Array | None] | None = None, depth: int = 0
) -> Array | None:
    """Return a small constant that is computed from weights by operators which change shapes; None for other values.

    known: values that were computed before, so that each is computed once.
    """
    known = {} if known is None else known
    if name not in known:
        known[name] = None  # for a value that depends on itself
        known[name] = _evaluate(graph, name, files, known, depth)
    return known[name]


def _evaluate(graph: Graph, name: str, files: WeightFiles, known: dict[str, Array | None], depth: int) -> Array | None:
    tensor = graph.find_tensor(name)
    if tensor is not None:
        small = 0 < tensor.byte_count <= MAX_TABLE_VALUES * 8
        return tensor_array(tensor, files.read) if small else None
    node = _node(graph, name)
    if (
        node is None
        or node.domain
        or node.op_type not in _SHAPING
        or depth > MAX_DEPTH
        or len(node.inputs) > MAX_INPUTS
    ):
        return None
    inputs = [evaluate(graph, each, files, known, depth + 1) for each in node.inputs]
    if not inputs or any(array is None for array in inputs):
        return None
    arrays = [array for array in inputs if array is not None]
    if max(array.size for array in arrays) > MAX_TABLE_VALUES:
        return None
    try:
        result = _run(node.op_type, arrays, node.attributes())
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError):
        return None
    return result if result is not None and result.size <= MAX_TABLE_VALUES else None


def _run(operator: str, arrays: list[Array], attributes: Mapping[str, Attribute]) -> Array | None:
    """Run one operator; None for other operators and for results that are too large."""
    first = arrays[0]
    if operator == "Unsqueeze":
        return np.expand_dims(first, tuple(int(axis) for axis in arrays[1]))
    if operator == "Expand":
        shape = np.broadcast_shapes(first.shape, tuple(int(size) for size in arrays[1]))
        return np.broadcast_to(first, shape) if np.prod(shape, dtype=float) <= MAX_TABLE_VALUES else None
    axis = attributes.get("axis")
    if operator == "Concat" and isinstance(axis, int):
        return np.concatenate(arrays, axis=axis)
    if operator in _ARITHMETIC:
        shape = np.broadcast_shapes(first.shape, arrays[1].shape)
        if np.prod(shape, dtype=float) > MAX_TABLE_VALUES:
            return None
        if operator == "Div" and not ((first >= 0).all() and (arrays[1] > 0).all()):
            return None  # the operator rounds to zero
        result: Array = _ARITHMETIC[operator](first, arrays[1])
        return result
    if operator == "Reshape":
        return first.reshape([int(size) for size in arrays[1]])
    if operator == "Cast" and attributes == {"to": DATA_TYPE_INT8}:
        return first.astype(np.int8)
    return None


def is_operator(node: Node, op_type: str, inputs: int) -> bool:
    """Return whether a node is this standard operator with so many inputs, and one output."""
    return node.op_type == op_type and not node.domain and len(node.inputs) == inputs and len(node.outputs) == 1


def _has_attributes(node: Node) -> bool:
    return any(field.number == NODE_ATTRIBUTE for field in iter_fields(node.encoded))


def _node(graph: Graph, name: str) -> Node | None:
    found = graph.find_producer(name)
    return found[0] if found is not None else None


def _integers(graph: Graph, name: str, files: WeightFiles) -> list[int] | None:
    """Return the integers of a small constant, flat."""
    tensor = graph.find_tensor(name)
    if tensor is None or tensor.dtype is None or tensor.dtype.kind not in "iu" or tensor.byte_count > 1024:
        return None
    array = tensor_array(tensor, files.read)
    return None if array is None else [int(value) for value in array.reshape(-1)]
