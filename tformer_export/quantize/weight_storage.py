"""Where integers are held: each matrix once in the file, in one form, from which onnxruntime makes the others.

What is derived is a few standard operators at the top of a graph, over constants alone: onnxruntime computes them when
it loads the file, and prepacks what comes out like any weight. Measured on four matrices of 512 × 32000, of which
kernels read both forms (onnxruntime 1.31): stored twice, a file of 133 MB, loaded in 0.46 s; stored packed, 68 MB and
0.57 s, with the same 141 MB resident. What lies between is given back when all is computed: while a file of int8 with
two forms is loaded it takes 3 bytes a weight more, of int4 6. Few operators are fast over bytes: of 4 bits, looking
both of a byte up took 8.5 ns a weight, and shifting, masking, casting and QuantizeLinear 25 (BitShift alone 9).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tformer_export.common.ir_edit import constant
from tformer_export.quantize.rounding import round_nearest


@dataclass
class Matrix:
    """(K, N) integers of a product. scale: float32 (N,). A form is made in a graph when it is first asked for there.

    columns: int8 (K, N); with a column's scale they are the weights. packed: what MatMulNBits reads, and its block
    scales (N, ⌈K / block⌉).
    """

    name: str
    bits: int
    block: int
    shape: tuple[int, int]
    scale: np.ndarray
    columns: Callable[[ir.Graph], ir.Value]
    packed: Callable[[ir.Graph], tuple[ir.Value, ir.Value]]


class Store:
    """The integers of a model. A matrix that is in two places is held once."""

    def __init__(self, model: ir.Model, ready: Mapping[str, round_nearest.Integers]) -> None:
        self.model, self.ready = model, ready
        self._tables: dict[bytes, tuple[ir.Value, np.ndarray]] = {}
        self._matrices: dict[tuple[bytes, int], Matrix] = {}
        self._made: dict[tuple[ir.Graph, str], ir.Value] = {}
        self._last: dict[ir.Graph, ir.Node] = {}  # in each graph, of what is made of constants there
        self._fingerprints: dict[tuple[ir.Value, bool], bytes] = {}

    def fingerprint(self, source: ir.Value, turned: bool) -> bytes:
        """Of a constant (N, K), or of one (K, N) that is turned round: the same for the same table."""
        key = source, turned
        if key not in self._fingerprints:
            assert source.const_value is not None
            held = source.const_value.numpy()
            self._fingerprints[key] = digest(held.T if turned else held)
        return self._fingerprints[key]

    def table(self, name: str, matrix: np.ndarray) -> tuple[ir.Value, np.ndarray]:
        """int8 (N, K), its rows those of a table, and their scales (N,)."""
        key = digest(matrix)
        if key not in self._tables:
            quantised, scale = round_nearest.per_column(matrix.T)
            self._tables[key] = self.constant(f"{name}.int8", np.ascontiguousarray(quantised.T)), scale
        return self._tables[key]

    def matrix(self, name: str, key: bytes, weight: Callable[[], np.ndarray], bits: int, packs: bool) -> Matrix:
        """The matrix (K, N), quantised at the first call. key: its fingerprint as (N, K). packs: hold it packed."""
        if (key, bits) not in self._matrices:
            make = self._of_4_bits if bits == 4 else self._packed_8 if packs else self._plain_8
            self._matrices[key, bits] = make(name, weight())
        return self._matrices[key, bits]

    def matrix_of_table(self, name: str, key: bytes, table: Callable[[], np.ndarray]) -> Matrix:
        """The matrix (K, N) of a table (N, K) that is held as such: its numbers stay those of the embedding."""
        if (key, 8) not in self._matrices:
            numbers = table()
            held, scale = self.table(name, numbers)
            columns, inner = numbers.shape
            block = round_nearest.block_of(inner)
            self._matrices[key, 8] = Matrix(
                name, 8, block, (inner, columns), scale,
                columns=lambda home: self._turned(home, name, held),
                packed=lambda home: self._raised(home, name, held, scale, block, inner),
            )  # fmt: skip
        return self._matrices[key, 8]

    def _plain_8(self, name: str, weight: np.ndarray) -> Matrix:
        """As columns; packed, which is not meant to be asked for, is made of them."""
        quantised, scale = self.ready[name] if name in self.ready else round_nearest.per_column(weight)
        inner, columns = weight.shape
        block = round_nearest.block_of(inner)
        held = self.constant(f"{name}.int8", quantised)

        def pack(home: ir.Graph) -> tuple[ir.Value, ir.Value]:
            return self._raised(home, name, self._turned(home, f"{name}.rows", held), scale, block, inner)

        return Matrix(
            name, 8, block, (inner, columns), scale, columns=lambda home: self._brought(home, held), packed=pack
        )

    def _packed_8(self, name: str, weight: np.ndarray) -> Matrix:
        quantised, scale = self.ready[name] if name in self.ready else round_nearest.per_column(weight)
        inner, columns = weight.shape
        block = round_nearest.block_of(inner)
        held = self.constant(f"{name}.packed", round_nearest.packed(quantised, 8, block))

        def unpack(home: ir.Graph) -> ir.Value:
            flipped = self._derive(home, "BitwiseXor", [held, self._half()], f"{name}.flipped")
            signed = self._derive(home, "Cast", [flipped], f"{name}.signed", to=ir.DataType.INT8)
            rows = self._derive(home, "Reshape", [signed, self._shape(columns, -1)], f"{name}.rows")
            return self._columns(home, name, rows, inner, block)

        return Matrix(
            name, 8, block, (inner, columns), scale,
            columns=unpack,
            packed=lambda home: (self._brought(home, held), self._scales(home, name, scale, inner, block)),
        )  # fmt: skip

    def _of_4_bits(self, name: str, weight: np.ndarray) -> Matrix:
        inner, columns = weight.shape
        block = round_nearest.block_of(inner)
        quantised, m, scale = self.ready[name] if name in self.ready else round_nearest.in_blocks(weight, block)
        held = self.constant(f"{name}.packed", round_nearest.packed(quantised, 4, block))
        factors = self.constant(f"{name}.factors", np.ascontiguousarray(m.T))  # (N, ⌈K / block⌉)

        def unpack(home: ir.Graph) -> ir.Value:
            """int8 (K, N) of m · q: both of a byte are looked up at once. (What a DequantizeLinear multiplies is not
            computed at load.)
            """
            byte = self._derive(home, "Cast", [held], f"{name}.byte", to=ir.DataType.INT32)
            factor = self._derive(home, "Cast", [factors], f"{name}.factor", to=ir.DataType.INT32)
            first = self._derive(home, "Mul", [factor, self.constant("unpack.bytes", np.int32(256))], f"{name}.first")
            begin = self._derive(home, "Unsqueeze", [first, self._shape(-1)], f"{name}.begin")
            place = self._derive(home, "Add", [byte, begin], f"{name}.place")
            pairs = self._derive(home, "Gather", [self._pairs(home), place], f"{name}.pairs", axis=0)
            signed = self._derive(home, "Reshape", [pairs, self._shape(columns, -1)], f"{name}.signed")
            return self._columns(home, name, signed, inner, block)

        def scales(home: ir.Graph) -> ir.Value:
            number = self._derive(home, "Cast", [factors], f"{name}.of_block", to=ir.DataType.FLOAT)
            by_column = self.constant(f"{name}.of_column", scale[:, None])
            return self._derive(home, "Mul", [number, by_column], f"{name}.scales")

        return Matrix(
            name,
            4,
            block,
            (inner, columns),
            scale,
            columns=unpack,
            packed=lambda home: (self._brought(home, held), scales(home)),
        )

    def _brought(self, home: ir.Graph, held: ir.Value) -> ir.Value:
        """A weight where it is prepacked: onnxruntime 1.31 looks for it in the branch that reads it and in the graph
        around that, and no further. So a stage that has branches has weights of its own, once the file is loaded."""
        if home is self.model.graph:
            return held
        return self._derive(home, "Concat", [held], str(held.name), axis=0)

    def _turned(self, home: ir.Graph, name: str, held: ir.Value) -> ir.Value:
        return self._derive(home, "Transpose", [held], f"{name}.transposed", perm=[1, 0])

    def _columns(self, home: ir.Graph, name: str, rows: ir.Value, inner: int, block: int) -> ir.Value:
        """int8 (K, N) of (N, K), without what filled K up."""
        if inner % block:
            begin, axis = self._shape(0), self._shape(1)
            rows = self._derive(home, "Slice", [rows, begin, self._shape(inner), axis], f"{name}.own")
        return self._turned(home, name, rows)

    def _raised(
        self, home: ir.Graph, name: str, rows: ir.Value, scale: np.ndarray, block: int, inner: int
    ) -> tuple[ir.Value, ir.Value]:
        """Packed of int8 (N, K), and the scales of its blocks."""
        raised = self._derive(home, "Cast", [rows], f"{name}.unsigned", to=ir.DataType.UINT8)
        raised = self._derive(home, "BitwiseXor", [raised, self._half()], f"{name}.raised")
        if inner % block:
            pads = self._shape(0, 0, 0, -inner % block)
            raised = self._derive(home, "Pad", [raised, pads, self._half()], f"{name}.filled")
        made = self._derive(home, "Reshape", [raised, self._shape(len(scale), -1, block)], f"{name}.packed")
        return made, self._scales(home, name, scale, inner, block)

    def _scales(self, home: ir.Graph, name: str, scale: np.ndarray, inner: int, block: int) -> ir.Value:
        """A column's scale for each of its blocks: float32 (N, ⌈K / block⌉)."""
        by_column = self.constant(f"{name}.of_column", scale[:, None])
        return self._derive(home, "Expand", [by_column, self._shape(1, -(-inner // block))], f"{name}.scales")

    def _pairs(self, home: ir.Graph) -> ir.Value:
        """int8 ((MOST + 1) · 256, 2): at 256 · m + byte, the two numbers of the byte times m. It is made of 16 numbers,
        for a small file is hardly larger than the table."""
        numbers = self.constant(
            "unpack.numbers", np.arange(round_nearest.LOWEST, round_nearest.HIGHEST + 1, dtype=np.int32)
        )
        factors = self.constant(
            "unpack.factors", np.arange(round_nearest.MOST + 1, dtype=np.int32)[:, None, None, None]
        )
        sides = []
        for side, axes in (("lower", (0, 2)), ("upper", (1, 2))):  # (upper half, lower half, 1)
            apart = self._derive(home, "Unsqueeze", [numbers, self._shape(*axes)], f"unpack.{side}.apart")
            sides.append(self._derive(home, "Expand", [apart, self._shape(16, 16, 1)], f"unpack.{side}"))
        both = self._derive(home, "Concat", sides, "unpack.both", axis=-1)
        times = self._derive(home, "Mul", [factors, both], "unpack.times")
        flat = self._derive(home, "Reshape", [times, self._shape(-1, 2)], "unpack.flat")
        return self._derive(home, "Cast", [flat], "unpack.pairs", to=ir.DataType.INT8)

    def _half(self) -> ir.Value:
        return self.constant("unpack.half", np.uint8(128))

    def _shape(self, *sizes: int) -> ir.Value:
        return self.constant(f"unpack.{'x'.join(map(str, sizes))}", np.array(sizes, np.int64))

    def _derive(
        self, home: ir.Graph, op: str, inputs: list[ir.Value], name: str, **attributes: int | str | list[int]
    ) -> ir.Value:
        """The output of a new node at the top of a graph, over constants; once for each name."""
        if (home, name) not in self._made:
            own = name if home is self.model.graph else f"{home.name}/{name}"
            node = ir.node(op, inputs, attributes, name=own)
            node.outputs[0].name = own
            if home in self._last:
                home.insert_after(self._last[home], node)
            else:
                home.insert_before(home[0], node)
            self._last[home], self._made[home, name] = node, node.outputs[0]
        return self._made[home, name]

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        return constant(self.model, name, array)


def digest(matrix: np.ndarray) -> bytes:
    """Of a matrix' shape and numbers."""
    found = hashlib.sha256(repr(matrix.shape).encode())
    found.update(np.ascontiguousarray(matrix).data)
    return found.digest()
