"""The operators that derive a weight from stored ones, recognised.

They are those of `tformer_export/quantize/weight_storage.py`. Constants and types are compared too, so that a weight is
recognised only if `weight_forms` writes what the operators compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import Array
from tformer_runtime.format import weight_forms
from tformer_runtime.format.constant_nodes import (
    DTYPES,
    Node,
    OtherFormError,
    Scope,
    Tensor,
    int_attribute,
    ints_attribute,
)
from tformer_runtime.format.onnx_fields import DATA_TYPE_INT8, DATA_TYPE_INT32, DATA_TYPE_UINT8

MAX_SMALL_NUMBERS = 1 << 15  # of constants that are computed to be compared
MAX_FACTOR = 8  # of a block of 4-bit numbers: m · q is an int8
UINT8, INT8 = DTYPES[DATA_TYPE_UINT8], DTYPES[DATA_TYPE_INT8]


@dataclass(frozen=True)
class DerivedWeight:
    """A weight that is made of stored ones.

    sources: the stored weights, which `write` gets as arrays before the array that it fills.
    write: None if the weight equals its only source.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    sources: tuple[Tensor, ...]
    write: Callable[..., None] | None


def match_weight(scope: Scope, node: Node) -> DerivedWeight:
    """Return the weight that a node computes. Raise OtherFormError if it is none that the exporter derives."""
    if node.op == b"Transpose":
        return _columns(scope, node)
    if node.op == b"Reshape":
        return _packed(scope, node)
    if node.op == b"Concat":
        return _copy(scope, node)
    raise OtherFormError


def _columns(scope: Scope, node: Node) -> DerivedWeight:
    """Match int8 columns (K, N): of a stored table, of packed numbers of 8 bits, or of 4 bits."""
    if ints_attribute(node, b"perm") != [1, 0]:
        raise OtherFormError
    name = node.inputs[0]
    if scope.node(name) is None:
        table = _matrix(scope.tensor(name), INT8)
        return DerivedWeight(INT8, table.shape[::-1], (table,), weight_forms.transpose)
    inner: int | None = None
    if (slice_node := scope.node(name)) is not None and slice_node.op == b"Slice":
        name, *bounds = slice_node.inputs
        begin, end, axis = (_small(scope, bound).tolist() for bound in bounds)
        if begin != [0] or axis != [1] or len(end) != 1:
            raise OtherFormError
        (inner,) = end
    reshape = _node(scope, name, b"Reshape")
    rows = scope.node(reshape.inputs[0])
    if rows is None:
        raise OtherFormError
    stored, sources, write = _of_4_bits(scope, rows) if rows.op == b"Gather" else _of_8_bits(scope, rows)
    count, blocks, block = stored.shape
    whole = blocks * block * (2 if rows.op == b"Gather" else 1)
    inner = whole if inner is None else inner
    if not 0 < inner <= whole or _small(scope, reshape.inputs[1]).tolist() != [count, -1]:
        raise OtherFormError
    return DerivedWeight(INT8, (inner, count), sources, write)


def _of_4_bits(scope: Scope, gather: Node) -> tuple[Tensor, tuple[Tensor, ...], Callable[..., None]]:
    """Match a lookup of both numbers of a byte: table[256 · m + byte]."""
    table, place = gather.inputs
    if int_attribute(gather, b"axis") != 0 or not np.array_equal(_small(scope, table), _INT4_PAIRS):
        raise OtherFormError
    byte, begin = _node(scope, place, b"Add").inputs
    first, axes = _node(scope, begin, b"Unsqueeze").inputs
    factor, bytes_of_factor = _node(scope, first, b"Mul").inputs
    if _small(scope, axes).tolist() != [-1] or _small(scope, bytes_of_factor).tolist() != 256:
        raise OtherFormError
    stored = scope.tensor(_cast(scope, byte, DATA_TYPE_INT32))
    factors = scope.tensor(_cast(scope, factor, DATA_TYPE_INT32))
    if stored.dtype != UINT8 or factors.dtype != UINT8 or len(stored.shape) != 3 or factors.shape != stored.shape[:2]:
        raise OtherFormError
    return stored, (stored, factors), _write_columns_of_4_bits


def _write_columns_of_4_bits(stored: npt.NDArray[np.uint8], factors: npt.NDArray[np.uint8], out: Array) -> None:
    if factors.size and factors.max() > MAX_FACTOR:
        raise ValueError(f"a block has a factor above {MAX_FACTOR}")
    weight_forms.columns_of_4_bits(stored, factors, out)


def _of_8_bits(scope: Scope, cast: Node) -> tuple[Tensor, tuple[Tensor, ...], Callable[..., None]]:
    """Match numbers that are stored plus 128."""
    if cast.op != b"Cast" or int_attribute(cast, b"to") != DATA_TYPE_INT8:
        raise OtherFormError
    stored = scope.tensor(_flipped(scope, cast.inputs[0]))
    if stored.dtype != UINT8 or len(stored.shape) != 3:
        raise OtherFormError
    return stored, (stored,), weight_forms.columns_of_8_bits


def _packed(scope: Scope, node: Node) -> DerivedWeight:
    """Match packed numbers of 8 bits, of rows (N, K) or of columns (K, N) that are stored."""
    name, shape = node.inputs
    pad = scope.node(name)
    if pad is not None and pad.op == b"Pad":
        name, pads, value = pad.inputs
        if int(_small(scope, value)) != 128 or _small(scope, pads).tolist()[:3] != [0, 0, 0]:
            raise OtherFormError
    rows = _cast(scope, _flipped(scope, name), DATA_TYPE_UINT8)
    transposed = scope.node(rows)
    if transposed is None:
        stored = _matrix(scope.tensor(rows), INT8)
        count, inner = stored.shape
    else:
        if transposed.op != b"Transpose" or ints_attribute(transposed, b"perm") != [1, 0]:
            raise OtherFormError
        stored = _matrix(scope.tensor(transposed.inputs[0]), INT8)
        inner, count = stored.shape
    sizes = _small(scope, shape).tolist()
    if len(sizes) != 3 or sizes[:2] != [count, -1] or sizes[2] < 1:
        raise OtherFormError

    def write(matrix: Array, out: Array) -> None:
        weight_forms.packed_8_bits(matrix if transposed is None else matrix.T, out)

    return DerivedWeight(UINT8, (count, -(-inner // sizes[2]), sizes[2]), (stored,), write)


def _copy(scope: Scope, node: Node) -> DerivedWeight:
    """Match a stored weight that a graph has under a name of its own."""
    if len(node.inputs) != 1:
        raise OtherFormError
    stored = scope.tensor(node.inputs[0])
    if stored.dtype is None or not stored.file or not stored.shape or int_attribute(node, b"axis") != 0:
        raise OtherFormError
    return DerivedWeight(stored.dtype, stored.shape, (stored,), None)


def _node(scope: Scope, name: bytes, op: bytes) -> Node:
    node = scope.node(name)
    if node is None or node.op != op:
        raise OtherFormError
    return node


def _cast(scope: Scope, name: bytes, data_type: int) -> bytes:
    """Return the operand of a Cast to a type."""
    node = _node(scope, name, b"Cast")
    if int_attribute(node, b"to") != data_type:
        raise OtherFormError
    return node.inputs[0]


def _flipped(scope: Scope, name: bytes) -> bytes:
    """Return the operand whose highest bit is flipped."""
    operand, bit = _node(scope, name, b"BitwiseXor").inputs
    if _small(scope, bit).tolist() != 128:
        raise OtherFormError
    return operand


def _matrix(tensor: Tensor, dtype: np.dtype[np.generic]) -> Tensor:
    if len(tensor.shape) != 2 or tensor.dtype != dtype:
        raise OtherFormError
    return tensor


def _small(scope: Scope, name: bytes) -> Array:
    """Return a constant of few numbers, computed if it is a node."""
    if name not in scope.small:
        scope.small[name] = _compute(scope, name)
    return scope.small[name]


def _compute(scope: Scope, name: bytes) -> Array:
    node = scope.node(name)
    if node is None:
        tensor = scope.tensor(name)
        if tensor.file:
            raise OtherFormError
        return tensor.array({})
    operands = [_small(scope, each) for each in node.inputs]
    size = math.prod(map(int, operands[1])) if node.op == b"Expand" else sum(each.size for each in operands)
    if (math.prod(each.size for each in operands) if node.op == b"Mul" else size) > MAX_SMALL_NUMBERS:
        raise OtherFormError
    if node.op == b"Cast":
        result = operands[0].astype(DTYPES.get(int_attribute(node, b"to") or 0))
    elif node.op == b"Mul":
        result = operands[0] * operands[1]
    elif node.op == b"Unsqueeze":
        result = np.expand_dims(operands[0], tuple(operands[1].tolist()))
    elif node.op == b"Expand":
        result = np.broadcast_to(operands[0], operands[1].tolist())
    elif node.op == b"Reshape":
        result = operands[0].reshape(operands[1].tolist())
    elif node.op == b"Concat":
        result = np.concatenate(operands, int_attribute(node, b"axis") or 0)
    else:
        raise OtherFormError
    return result


def _int4_pairs() -> npt.NDArray[np.int8]:
    """Return the table that unpacks 4 bits: row 256 · m + byte has both numbers of the byte times m."""
    numbers = np.arange(256)
    pairs = np.stack([numbers & 15, numbers >> 4], -1) - weight_forms.INT4_OFFSET
    table: npt.NDArray[np.int8] = (np.arange(MAX_FACTOR + 1)[:, None, None] * pairs).reshape(-1, 2).astype(np.int8)
    return table


_INT4_PAIRS = _int4_pairs()
