"""Storage of integer weights: each matrix is in the file once, in one form, from which onnxruntime makes the others.

The other forms are computed by a few standard operators over constants at the top of a graph
(`tformer_runtime/format/stored_forms.py`). onnxruntime runs them when it loads the file, packs their results like any
weight, and releases intermediate results at the end. This makes files half as large. The operators were chosen by
speed, because few are fast over bytes. Figures: docs/design/quantization.md#storage-of-weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.common.option_values import THROUGHPUT
from tformer_export.passes.weight_bits import describe
from tformer_export.quantize.form_writer import FormWriter
from tformer_export.quantize.rounding import round_nearest
from tformer_runtime.format.stored_forms import (
    BITS,
    INT4_BLOCKS,
    INT6_PLANES,
    INT8_BLOCKS,
    INT8_COLUMNS,
    INT8_ROWS,
    PAIRS,
    Expression,
    MatrixSpec,
    block_scales_of,
    columns_of,
    operator,
    packed_of,
    sizes,
    zero_points_of,
)

Packed = tuple[ir.Value, ir.Value, ir.Value | None]


@dataclass
class StoredMatrix:
    """The integers (K, N) of a product. Each form is made once in a graph, when it is first requested there.

    scale: float32 (N,). The weights are the integers times the scale of their column.
    values: the constants of the file, by their names in expressions.
    """

    name: str
    spec: MatrixSpec
    scale: np.ndarray
    values: dict[str, ir.Value]

    @property
    def bits(self) -> int:
        return BITS[self.spec.form]

    @property
    def packed_bits(self) -> int:
        return 4 if self.bits == 4 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.spec.inner, self.spec.columns


class WeightStore:
    """The integers of a model. A matrix that is used twice is stored once.

    integers: name of a product → its integers; other products are rounded to nearest.
    optimize_for: chooses the blocks of 4 bits.
    """

    def __init__(
        self, model: ir.Model, integers: Mapping[str, round_nearest.Integers], optimize_for: str = THROUGHPUT
    ) -> None:
        self.model, self.integers, self.optimize_for = model, integers, optimize_for
        self.writer = FormWriter(model)
        self._tables: dict[bytes, tuple[ir.Value, np.ndarray]] = {}
        self._matrices: dict[tuple[bytes, int], StoredMatrix] = {}
        self._last_nodes: dict[ir.Graph, ir.Node] = {}  # graph → the last node at its top that derives a constant
        self._fingerprints: dict[tuple[ir.Value, bool], bytes] = {}

    def fingerprint(self, source: ir.Value, is_transposed: bool) -> bytes:
        """Return the digest of a constant as (N, K); a constant (K, N) is given with `is_transposed`."""
        key = source, is_transposed
        if key not in self._fingerprints:
            assert source.const_value is not None
            array = source.const_value.numpy()
            self._fingerprints[key] = digest(array.T if is_transposed else array)
        return self._fingerprints[key]

    def table(self, name: str, matrix: np.ndarray) -> tuple[ir.Value, np.ndarray]:
        """Return an embedding table in int8 (N, K), and the scales of its rows (N,)."""
        key = digest(matrix)
        if key not in self._tables:
            quantized, scale = self._int8(name, matrix.T)
            stored = self._weights(f"{name}.int8", np.ascontiguousarray(quantized.T), 8, matrix.shape)
            self._tables[key] = stored, scale
        return self._tables[key]

    def stack(self, name: str, stack: np.ndarray) -> tuple[ir.Value, ir.Value]:
        """Return a stack of matrices (…, K, N) in int8, and the scales of the columns of each matrix, (…, 1, N)."""
        *sizes, inner, columns = stack.shape
        quantized, scale = round_nearest.per_column(np.moveaxis(stack, -2, 0).reshape(inner, -1))
        integers = np.ascontiguousarray(np.moveaxis(quantized.reshape(inner, *sizes, columns), 0, -2))
        stored = self._weights(f"{name}.int8", integers, 8, stack.shape)
        return stored, self.constant(f"{name}.column_scales", scale.reshape(*sizes, 1, columns))

    def matrix(
        self, name: str, key: bytes, weight: Callable[[], np.ndarray], bits: int, is_packed: bool
    ) -> StoredMatrix:
        """Return the matrix (K, N), quantised at the first call.

        key: its fingerprint as (N, K).
        is_packed: whether it is stored packed.
        """
        if (key, bits) not in self._matrices:
            make = {4: self._of_4_bits, 6: self._of_6_bits, 8: self._blocks_of_8 if is_packed else self._columns_of_8}
            self._matrices[key, bits] = make[bits](name, weight())
        return self._matrices[key, bits]

    def matrix_of_table(self, name: str, key: bytes, table: Callable[[], np.ndarray]) -> StoredMatrix:
        """Return the matrix (K, N) of a table (N, K) that is stored as a table, with the integers of the embedding."""
        if (key, 8) not in self._matrices:
            values = table()
            stored, scale = self.table(name, values)
            self._matrices[key, 8] = self._matrix(name, INT8_ROWS, values.T.shape, scale, stored)
        return self._matrices[key, 8]

    def columns(self, home: ir.Graph, matrix: StoredMatrix) -> ir.Value:
        """Return the int8 columns (K, N) of a matrix, derived in a graph."""
        return self._derive(home, matrix, columns_of(matrix.spec, self._is_local(home)))

    def packed(self, home: ir.Graph, matrix: StoredMatrix) -> Packed:
        """Return operands of MatMulNBits, derived in a graph.

        They are the weights, the scales of blocks (N, ⌈K / block⌉), and their zero points, which 4 bits have.
        """
        packed = self._derive(home, matrix, packed_of(matrix.spec, self._is_local(home)))
        scales, zeros = block_scales_of(matrix.spec), zero_points_of(matrix.spec)
        return packed, self._derive(home, matrix, scales), self._derive(home, matrix, zeros) if zeros else None

    def scale_of_rows(self, matrix: StoredMatrix) -> ir.Value:
        """Return the scales of the columns of a matrix, (N, 1)."""
        return self.constant(f"{matrix.name}.of_column", matrix.scale[:, None])

    def _int8(self, name: str, weight: np.ndarray, bits: int = 8) -> round_nearest.Integers:
        """Return int8 (K, N) of 8 or 6 bits, and the scales of columns (N,)."""
        return self.integers[name] if name in self.integers else round_nearest.per_column(weight, bits)

    def _columns_of_8(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as int8 columns. The packed form, which is rarely used then, is derived from them."""
        quantized, scale = self._int8(name, weight)
        stored = self._weights(f"{name}.int8", quantized, 8, weight.shape)
        return self._matrix(name, INT8_COLUMNS, weight.shape, scale, stored)

    def _blocks_of_8(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as MatMulNBits reads it."""
        quantized, scale = self._int8(name, weight)
        packed = round_nearest.pack(quantized, 8, round_nearest.block_rows(len(weight)))
        stored = self._weights(f"{name}.packed", packed, 8, weight.shape)
        return self._matrix(name, INT8_BLOCKS, weight.shape, scale, stored)

    def _of_6_bits(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as two planes, of 4 and of 2 bits a number. The other forms have 8 bits."""
        quantized, scale = self._int8(name, weight, 6)
        upper, lower = round_nearest.pack_6_bits(quantized)
        stored = self._weights(f"{name}.upper", upper, 6, weight.shape)
        return self._matrix(
            name, INT6_PLANES, weight.shape, scale, stored, lower=self.constant(f"{name}.lower", lower)
        )  # fmt: skip

    def _of_4_bits(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix in 4 bits as MatMulNBits reads it, with the code of each block."""
        blocks = round_nearest.int4_blocks(len(weight), self.optimize_for)
        quantized, numbers, scale = (
            self.integers[name] if name in self.integers else round_nearest.in_blocks(weight, blocks)
        )
        stored = self._weights(f"{name}.packed", round_nearest.pack(quantized, 4, blocks.rows), 4, weight.shape)
        codes = self.constant(f"{name}.codes", np.ascontiguousarray(numbers.T))  # (N, ⌈K / block⌉)
        return self._matrix(name, INT4_BLOCKS, weight.shape, scale, stored, blocks.rows, codes=codes)

    def _matrix(
        self,
        name: str,
        form: str,
        shape: tuple[int, ...],
        scale: np.ndarray,
        stored: ir.Value,
        block: int = 0,
        **further: ir.Value,
    ) -> StoredMatrix:
        """Return the matrix of a stored constant, and of further ones by their names in expressions."""
        inner, columns = shape
        names = {key: str(value.name) for key, value in further.items()}
        spec = MatrixSpec(
            form, inner, columns, block or round_nearest.block_rows(inner), str(stored.name), **names
        )  # fmt: skip
        return StoredMatrix(name, spec, scale, {"weights": stored, **further})

    def _is_local(self, home: ir.Graph) -> bool:
        """Return whether a weight needs a copy in a place where onnxruntime packs it.

        onnxruntime 1.31 looks for a weight in the branch that reads it and in the graph around that branch, but no
        further. So a stage with branches gets weights of its own when the file is loaded.
        """
        return home is not self.model.graph

    def pairs(self, home: ir.Graph) -> ir.Value:
        """Return the table that unpacks 4 bits (`stored_forms.PAIRS`)."""
        return self._insert(home, PAIRS, {}, "unpack")

    def rows_of(self, home: ir.Graph, matrix: StoredMatrix, packed: ir.Value) -> ir.Value:
        """Return the packed form of a matrix with its blocks joined, (N, bytes of K)."""
        count = matrix.spec.blocks * matrix.spec.block * matrix.packed_bits // 8
        joined = operator("Reshape", "packed", sizes(matrix.spec.columns, count))
        return self._insert(home, joined, {"packed": packed}, matrix.name)

    def shape(self, *numbers: int) -> ir.Value:
        """Return a constant int64 vector."""
        return self.writer.constant(sizes(*numbers))

    def _derive(self, home: ir.Graph, matrix: StoredMatrix, expression: Expression) -> ir.Value:
        return self._insert(home, expression, {**matrix.values, "scale": self.scale_of_rows(matrix)}, matrix.name)

    def _insert(self, home: ir.Graph, expression: Expression, values: dict[str, ir.Value], name: str) -> ir.Value:
        """Return the value of an expression over constants, computed at the top of a graph."""

        def insert(node: ir.Node) -> None:
            if home in self._last_nodes:
                home.insert_after(self._last_nodes[home], node)
            else:
                home.insert_before(home[0], node)
            self._last_nodes[home] = node

        name = name if home is self.model.graph else f"{home.name}/{name}"
        value = self.writer.value(home, expression, values, name, insert)
        assert value is not None
        return value

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        """Return the model's constant of this name, added at the first call. It stands for no weights."""
        return describe(constant(self.model, name, array))

    def _weights(self, name: str, array: np.ndarray, bits: int, shape: Sequence[int]) -> ir.Value:
        """Return a constant that stands for weights of this shape in these bits."""
        return describe(constant(self.model, name, array), bits, math.prod(shape))


def digest(matrix: np.ndarray) -> bytes:
    """Return a digest of the shape and the numbers of a matrix."""
    result = hashlib.sha256(repr(matrix.shape).encode())
    result.update(np.ascontiguousarray(matrix).data)
    return result.digest()
