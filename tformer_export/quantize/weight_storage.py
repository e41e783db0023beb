"""Storage of integer weights: each matrix is in the file once, in one form, from which onnxruntime makes the others.

The other forms are computed by a few standard operators over constants at the top of a graph. onnxruntime runs them
when it loads the file, packs their results like any weight, and releases intermediate results at the end. This makes
files half as large. The operators were chosen by speed, because few are fast over bytes. Both runtimes recognise them
and compute their results themselves (`tformer_runtime/rewriting/stored_weights.py`,
`runtime/web/src/format/storedWeights.ts`): change all together. Figures:
docs/design/quantization.md#storage-of-weights.
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
from tformer_export.quantize.rounding import round_nearest
from tformer_runtime.format.weight_forms import tables_of_6_bits

Packed = tuple[ir.Value, ir.Value, ir.Value | None]


@dataclass
class StoredMatrix:
    """The integers (K, N) of a product. Each form is made once in a graph, when it is first requested there.

    scale: float32 (N,).
    packed_bits: of the packed form.
    columns: graph → int8 (K, N); multiplied by the column's scale they are the weights.
    packed: graph → operands of MatMulNBits: the weights, the scales of blocks (N, ⌈K / block⌉), and their zero points,
        which 4 bits have.
    rows: 4 bits as they are stored, uint8 (N, ⌈K / block⌉, block / 2), and the codes of blocks (N, ⌈K / block⌉); else
        None.
    """

    name: str
    bits: int
    block: int
    shape: tuple[int, int]
    scale: np.ndarray
    columns: Callable[[ir.Graph], ir.Value]
    packed: Callable[[ir.Graph], Packed]
    rows: tuple[ir.Value, ir.Value] | None = None

    @property
    def packed_bits(self) -> int:
        return 4 if self.bits == 4 else 8


class WeightStore:
    """The integers of a model. A matrix that is used twice is stored once.

    integers: name of a product → its integers; other products are rounded to nearest.
    optimize_for: chooses the blocks of 4 bits.
    """

    def __init__(
        self, model: ir.Model, integers: Mapping[str, round_nearest.Integers], optimize_for: str = THROUGHPUT
    ) -> None:
        self.model, self.integers, self.optimize_for = model, integers, optimize_for
        self._tables: dict[bytes, tuple[ir.Value, np.ndarray]] = {}
        self._matrices: dict[tuple[bytes, int], StoredMatrix] = {}
        self._derived: dict[tuple[ir.Graph, str], ir.Value] = {}
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
            make = {4: self._of_4_bits, 6: self._of_6_bits, 8: self._packed_8 if is_packed else self._plain_8}[bits]
            self._matrices[key, bits] = make(name, weight())
        return self._matrices[key, bits]

    def matrix_of_table(self, name: str, key: bytes, table: Callable[[], np.ndarray]) -> StoredMatrix:
        """Return the matrix (K, N) of a table (N, K) that is stored as a table, with the integers of the embedding."""
        if (key, 8) not in self._matrices:
            values = table()
            stored, scale = self.table(name, values)
            columns, inner = values.shape
            block = round_nearest.block_rows(inner)
            self._matrices[key, 8] = StoredMatrix(
                name, 8, block, (inner, columns), scale,
                columns=lambda home: self._transpose(home, name, stored),
                packed=lambda home: self._pack(home, name, stored, scale, block, inner),
            )  # fmt: skip
        return self._matrices[key, 8]

    def _int8(self, name: str, weight: np.ndarray, bits: int = 8) -> round_nearest.Integers:
        """Return int8 (K, N) of 8 or 6 bits, and the scales of columns (N,)."""
        return self.integers[name] if name in self.integers else round_nearest.per_column(weight, bits)

    def _plain_8(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as int8 columns. The packed form, which is rarely used then, is derived from them."""
        quantized, scale = self._int8(name, weight)
        inner, columns = weight.shape
        block = round_nearest.block_rows(inner)
        stored = self._weights(f"{name}.int8", quantized, 8, weight.shape)

        def pack(home: ir.Graph) -> Packed:
            return self._pack(home, name, self._transpose(home, f"{name}.rows", stored), scale, block, inner)

        return StoredMatrix(
            name, 8, block, (inner, columns), scale, columns=lambda home: self._local(home, stored), packed=pack
        )

    def _packed_8(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as MatMulNBits reads it."""
        quantized, scale = self._int8(name, weight)
        inner, columns = weight.shape
        block = round_nearest.block_rows(inner)
        stored = self._weights(f"{name}.packed", round_nearest.pack(quantized, 8, block), 8, weight.shape)

        def unpack(home: ir.Graph) -> ir.Value:
            flipped = self._derive(home, "BitwiseXor", [stored, self._uint8_middle()], f"{name}.flipped")
            signed = self._derive(home, "Cast", [flipped], f"{name}.signed", to=ir.DataType.INT8)
            rows = self._derive(home, "Reshape", [signed, self.shape(columns, -1)], f"{name}.rows")
            return self._unpadded_columns(home, name, rows, inner, block)

        return StoredMatrix(
            name, 8, block, (inner, columns), scale,
            columns=unpack,
            packed=lambda home: (self._local(home, stored), self._scales(home, name, scale, inner, block), None),
        )  # fmt: skip

    def _of_6_bits(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix as two planes, of 4 and of 2 bits a number. The other forms have 8 bits."""
        quantized, scale = self._int8(name, weight, 6)
        inner, columns = weight.shape
        block = round_nearest.block_rows(inner)
        upper, lower = round_nearest.pack_6_bits(quantized)
        planes = self._weights(f"{name}.upper", upper, 6, weight.shape), self.constant(f"{name}.lower", lower)
        upper_table, lower_table = tables_of_6_bits()
        tables = (
            self.constant("unpack.upper_plane", upper_table),
            self.constant("unpack.lower_plane", lower_table),
        )

        def unpack_rows(home: ir.Graph) -> ir.Value:
            parts = []
            for part, plane, table in zip(("upper", "lower"), planes, tables, strict=True):
                place = self._derive(home, "Cast", [plane], f"{name}.{part}.int32", to=ir.DataType.INT32)
                numbers = self._derive(home, "Gather", [table, place], f"{name}.{part}.numbers", axis=0)
                parts.append(self._derive(home, "Reshape", [numbers, self.shape(columns, -1)], f"{name}.{part}.rows"))
            return self._unpadded(home, name, self._derive(home, "BitwiseOr", parts, f"{name}.signed"), inner, 4)

        return StoredMatrix(
            name, 6, block, (inner, columns), scale,
            columns=lambda home: self._transpose(home, name, unpack_rows(home)),
            packed=lambda home: self._pack(home, name, unpack_rows(home), scale, block, inner),
        )  # fmt: skip

    def _of_4_bits(self, name: str, weight: np.ndarray) -> StoredMatrix:
        """Store the matrix in 4 bits as MatMulNBits reads it, with the code of each block."""
        inner, columns = weight.shape
        blocks = round_nearest.int4_blocks(inner, self.optimize_for)
        quantized, numbers, scale = (
            self.integers[name] if name in self.integers else round_nearest.in_blocks(weight, blocks)
        )
        stored = self._weights(f"{name}.packed", round_nearest.pack(quantized, 4, blocks.rows), 4, weight.shape)
        codes = self.constant(f"{name}.codes", np.ascontiguousarray(numbers.T))  # (N, ⌈K / block⌉)

        def unpack(home: ir.Graph) -> ir.Value:
            # int8 (K, N). One lookup unpacks both numbers of a byte. onnxruntime would not compute the results of a
            # DequantizeLinear when it loads the file.
            byte = self._derive(home, "Cast", [stored], f"{name}.byte", to=ir.DataType.INT32)
            code = self._derive(home, "Cast", [codes], f"{name}.code", to=ir.DataType.INT32)
            first = self._derive(home, "Mul", [code, self.constant("unpack.bytes", np.int32(256))], f"{name}.first")
            begin = self._derive(home, "Unsqueeze", [first, self.shape(-1)], f"{name}.begin")
            place = self._derive(home, "Add", [byte, begin], f"{name}.place")
            pairs = self._derive(home, "Gather", [self.pairs(home), place], f"{name}.pairs", axis=0)
            signed = self._derive(home, "Reshape", [pairs, self.shape(columns, -1)], f"{name}.signed")
            return self._unpadded_columns(home, name, signed, inner, blocks.rows)

        def pack(home: ir.Graph) -> Packed:
            return self._local(home, stored), *self._steps_of_4_bits(home, name, codes, numbers.shape[0], scale)

        rows = stored, codes
        return StoredMatrix(name, 4, blocks.rows, (inner, columns), scale, columns=unpack, packed=pack, rows=rows)

    def _steps_of_4_bits(
        self, home: ir.Graph, name: str, codes: ir.Value, count: int, scale: np.ndarray
    ) -> tuple[ir.Value, ir.Value]:
        """Return the scales of blocks (N, blocks), and their zero points, two in a byte, (N, ⌈blocks / 2⌉).

        count: the number of blocks.
        """
        fewer = self._derive(home, "BitwiseAnd", [codes, self.constant("unpack.m", np.uint8(7))], f"{name}.fewer")
        number = self._derive(home, "Cast", [fewer], f"{name}.number", to=ir.DataType.FLOAT)
        m = self._derive(home, "Add", [number, self.constant("unpack.one", np.float32(1))], f"{name}.m")
        by_column = self.constant(f"{name}.of_column", scale[:, None])
        scales = self._derive(home, "Mul", [m, by_column], f"{name}.scales")
        shifts = [codes, self.constant("unpack.to_zero", np.uint8(4))]  # of z / 2, the upper half of a code
        zeros = self._derive(home, "BitShift", shifts, f"{name}.zeros", direction="RIGHT")
        if count % 2:
            zeros = self._derive(home, "Pad", [zeros, self.shape(0, 0, 0, 1)], f"{name}.even")
        pairs = self._derive(home, "Reshape", [zeros, self.shape(len(scale), -1, 2)], f"{name}.zero_pairs")
        wide = self._derive(home, "Cast", [pairs], f"{name}.wide", to=ir.DataType.INT32)
        places = self.constant("unpack.places", np.array([1, 16], np.int32))
        placed = self._derive(home, "Mul", [wide, places], f"{name}.placed")
        both = self._derive(home, "ReduceSum", [placed, self.shape(-1)], f"{name}.both", keepdims=0)
        return scales, self._derive(home, "Cast", [both], f"{name}.zero_points", to=ir.DataType.UINT8)

    def _local(self, home: ir.Graph, stored: ir.Value) -> ir.Value:
        """Return a weight in a place where onnxruntime packs it.

        onnxruntime 1.31 looks for a weight in the branch that reads it and in the graph around that branch, but no
        further. So a stage with branches gets weights of its own when the file is loaded.
        """
        if home is self.model.graph:
            return stored
        return self._derive(home, "Concat", [stored], str(stored.name), axis=0)

    def _transpose(self, home: ir.Graph, name: str, stored: ir.Value) -> ir.Value:
        return self._derive(home, "Transpose", [stored], f"{name}.transposed", perm=[1, 0])

    def _unpadded_columns(self, home: ir.Graph, name: str, rows: ir.Value, inner: int, block: int) -> ir.Value:
        """Return int8 (K, N) of int8 (N, K), without the numbers that pad K to whole blocks."""
        return self._transpose(home, name, self._unpadded(home, name, rows, inner, block))

    def _unpadded(self, home: ir.Graph, name: str, rows: ir.Value, inner: int, block: int) -> ir.Value:
        """Return int8 (N, K) without the numbers that pad K to whole blocks."""
        if inner % block == 0:
            return rows
        begin, axis = self.shape(0), self.shape(1)
        return self._derive(home, "Slice", [rows, begin, self.shape(inner), axis], f"{name}.own")

    def _pack(self, home: ir.Graph, name: str, rows: ir.Value, scale: np.ndarray, block: int, inner: int) -> Packed:
        """Return the packed form of int8 (N, K), and the scales of its blocks."""
        raised = self._derive(home, "Cast", [rows], f"{name}.unsigned", to=ir.DataType.UINT8)
        raised = self._derive(home, "BitwiseXor", [raised, self._uint8_middle()], f"{name}.raised")
        if inner % block:
            pads = self.shape(0, 0, 0, -inner % block)
            raised = self._derive(home, "Pad", [raised, pads, self._uint8_middle()], f"{name}.filled")
        packed = self._derive(home, "Reshape", [raised, self.shape(len(scale), -1, block)], f"{name}.packed")
        return packed, self._scales(home, name, scale, inner, block), None

    def _scales(self, home: ir.Graph, name: str, scale: np.ndarray, inner: int, block: int) -> ir.Value:
        """Return the scale of a column for each of its blocks: float32 (N, ⌈K / block⌉)."""
        by_column = self.constant(f"{name}.of_column", scale[:, None])
        return self._derive(home, "Expand", [by_column, self.shape(1, -(-inner // block))], f"{name}.scales")

    def pairs(self, home: ir.Graph) -> ir.Value:
        """Return the table that unpacks 4 bits: int8 (256 · 256, 2).

        Row 256 · code + byte has both numbers of the byte as weights of a block with this code. The table is derived
        from few numbers, because small files are hardly larger than the table.
        """
        q = self.constant("unpack.numbers", np.arange(round_nearest.MAX_INT4 + 1, dtype=np.int32))
        m = self.constant("unpack.multipliers", np.arange(1, round_nearest.MAX_BLOCK_MULTIPLIER + 1, dtype=np.int32))
        z = self.constant("unpack.zeros", np.arange(round_nearest.MAX_BLOCK_ZERO + 1, dtype=np.int32)[:, None])
        sides = []
        for side, axes in (("lower", (0, 2)), ("upper", (1, 2))):  # (upper half, lower half, 1)
            expanded = self._derive(home, "Unsqueeze", [q, self.shape(*axes)], f"unpack.{side}.apart")
            sides.append(self._derive(home, "Expand", [expanded, self.shape(16, 16, 1)], f"unpack.{side}"))
        both = self._derive(home, "Concat", sides, "unpack.both", axis=-1)
        m_apart = self._derive(home, "Unsqueeze", [m, self.shape(1, 2, 3)], "unpack.m_apart")
        times = self._derive(home, "Mul", [m_apart, both], "unpack.times")  # (m, 16, 16, 2)
        product = self._derive(home, "Mul", [m, z], "unpack.products")
        shift = self._derive(home, "Div", [product, self.constant("unpack.two", np.int32(2))], "unpack.shift")
        shift_apart = self._derive(home, "Unsqueeze", [shift, self.shape(2, 3, 4)], "unpack.shift_apart")
        weights = self._derive(home, "Sub", [times, shift_apart], "unpack.weights")  # (z, m, 16, 16, 2)
        flat = self._derive(home, "Reshape", [weights, self.shape(-1, 2)], "unpack.flat")
        return self._derive(home, "Cast", [flat], "unpack.pairs", to=ir.DataType.INT8)

    def _uint8_middle(self) -> ir.Value:
        return self.constant("unpack.half", np.uint8(128))

    def rows_of(self, home: ir.Graph, matrix: StoredMatrix, packed: ir.Value) -> ir.Value:
        """Return the packed form of a matrix with its blocks joined, (N, bytes of K)."""
        count = -(-matrix.shape[0] // matrix.block) * matrix.block * matrix.packed_bits // 8
        sizes = self.shape(matrix.shape[1], count)
        return self._derive(home, "Reshape", [packed, sizes], f"{matrix.name}.joined")

    def shape(self, *sizes: int) -> ir.Value:
        """Return a constant int64 vector."""
        return self.constant(f"unpack.{'x'.join(map(str, sizes))}", np.array(sizes, np.int64))

    def _derive(
        self, home: ir.Graph, op: str, inputs: list[ir.Value], name: str, **attributes: int | str | list[int]
    ) -> ir.Value:
        """Return the output of a node over constants at the top of a graph, inserted once for each name."""
        if (home, name) not in self._derived:
            node_name = name if home is self.model.graph else f"{home.name}/{name}"
            node = ir.node(op, inputs, attributes, name=node_name)
            node.outputs[0].name = node_name
            if home in self._last_nodes:
                home.insert_after(self._last_nodes[home], node)
            else:
                home.insert_before(home[0], node)
            self._last_nodes[home], self._derived[home, name] = node, node.outputs[0]
        return self._derived[home, name]

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
