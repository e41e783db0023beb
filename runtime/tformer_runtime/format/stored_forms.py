"""Stored forms of quantised products: their records in the manifest, and the operators that a graph has for them.

A file stores the integers of each matrix once (`MatrixSpec`). Operators over constants derive the forms that products
read from them. Further operators round a product's float input to integers and scale its sums (`ProductSpec`).

This module has these operators as expressions. The exporter inserts them into a graph. Runtimes compare the graph of a
product's record with them before they replace any, because a file may be wrong. `storedForms.ts` has the expressions
that the web runtime compares; a test compares both modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, NamedTuple, Union

import msgspec
from msgspec import Struct, field

from tformer_runtime.format.onnx_fields import DATA_TYPE_FLOAT, DATA_TYPE_INT8, DATA_TYPE_INT32, DATA_TYPE_UINT8
from tformer_runtime.format.typed_json import Count, Index, Name
from tformer_runtime.format.weight_forms import MIDDLE, tables_of_6_bits

INT8_COLUMNS, INT8_ROWS, INT8_BLOCKS = "int8_columns", "int8_rows", "int8_blocks"  # forms of a matrix
INT6_PLANES, INT4_BLOCKS = "int6_planes", "int4_blocks"
BITS = {INT8_COLUMNS: 8, INT8_ROWS: 8, INT8_BLOCKS: 8, INT6_PLANES: 6, INT4_BLOCKS: 4}
CONTRIB = "com.microsoft"
TO_FLOAT_PRODUCT = "MatMulIntegerToFloat"
CODE_STEP = 256  # rows of `PAIRS` for each code
VALUES_OF_LOWER = 4  # of a byte of the lower plane of 6 bits

Float = Annotated[float, msgspec.Meta(ge=0)]


class MatrixSpec(Struct, frozen=True):
    """The integers (K, N) of products, as the file stores them.

    form: INT8_COLUMNS (K, N); INT8_ROWS (N, K); INT8_BLOCKS, uint8 (N, ⌈K / block⌉, block), plus 128; INT4_BLOCKS,
        uint8 (N, ⌈K / block⌉, block / 2), two numbers in a byte; or INT6_PLANES, uint8 (N, 2 · ⌈K / 4⌉) and
        (N, ⌈K / 4⌉) (`weight_forms`).
    inner, columns: K and N.
    block: the rows of a block of MatMulNBits, which reads every form as blocks.
    weights: name of the constant that has them.
    codes: of INT4_BLOCKS, name of the codes of the blocks, uint8 (N, ⌈K / block⌉).
    lower: of INT6_PLANES, name of the second plane.
    """

    form: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(BITS)})$")]
    inner: Count
    columns: Count
    block: Count
    weights: Name
    codes: Name | None = None
    lower: Name | None = None

    @property
    def blocks(self) -> int:
        """The number of blocks of a column."""
        return -(-self.inner // self.block)

    @property
    def is_packed(self) -> bool:
        """Whether MatMulNBits reads the stored form."""
        return self.form in (INT8_BLOCKS, INT4_BLOCKS)

    def constants(self) -> dict[str, tuple[str | None, str, tuple[int, ...]]]:
        """Return a constant's name in expressions → its name in the graph, its type and its shape."""
        groups = -(-self.inner // VALUES_OF_LOWER)
        shapes = {
            INT8_COLUMNS: (self.inner, self.columns),
            INT8_ROWS: (self.columns, self.inner),
            INT8_BLOCKS: (self.columns, self.blocks, self.block),
            INT4_BLOCKS: (self.columns, self.blocks, self.block // 2),
            INT6_PLANES: (self.columns, 2 * groups),
        }
        kind = "int8" if self.form in (INT8_COLUMNS, INT8_ROWS) else "uint8"
        constants: dict[str, tuple[str | None, str, tuple[int, ...]]] = {
            "weights": (self.weights, kind, shapes[self.form])
        }
        if self.form == INT4_BLOCKS:
            constants["codes"] = self.codes, "uint8", (self.columns, self.blocks)
        if self.form == INT6_PLANES:
            constants["lower"] = self.lower, "uint8", (self.columns, groups)
        return constants


class RowScaling(Struct, frozen=True):
    """How a row of activations x becomes uint8: round(x / scale) + zero with scale = step · maximum.

    magnitude: whether the maximum is that of |x|; else it is that of x, and `floor` at least.
    reciprocal: whether x is multiplied by 1 / scale instead.
    fixed_scale: the scale of all rows, without a maximum; 0 for none.
    may_be_empty: whether there may be no rows.
    """

    magnitude: bool
    floor: Float
    step: Float
    zero: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reciprocal: bool = False
    fixed_scale: Float = 0.0
    may_be_empty: bool = False


class ProductSpec(Struct, frozen=True):
    """A quantised product. Its key in `StoredProducts` is the name of the result of its MatMul operator.

    matrix: the index of its matrix.
    source, result: names of its float input (…, K) and output (…, N).
    scale: name of the scales of columns, float32 (N,), or (N, 1) for MatMulNBits.
    bias: name of the vector (N,) that is added.
    scaling: how activations become integers; None for MatMulNBits, which rounds them itself or not at all.
    """

    matrix: Index
    source: Name
    result: Name
    scale: Name
    bias: Name | None = None
    scaling: RowScaling | None = None


class StoredProducts(Struct, frozen=True):
    """The matrices and the quantised products of a file."""

    matrices: tuple[MatrixSpec, ...] = ()
    products: Mapping[str, ProductSpec] = field(default_factory=dict)


class Constant(NamedTuple):
    """A constant of an expression. dtype: numpy's name of the type."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | float, ...]


class Operator(NamedTuple):
    """An operator with exactly these inputs and attributes, and with one output."""

    op_type: str
    inputs: tuple[Expression, ...]
    attributes: Mapping[str, int | str | list[int]]
    domain: str


Expression = Union[str, Constant, Operator]  # noqa: UP007  # a name stands for a value of the record, "" for no input


def operator(op_type: str, *inputs: Expression, domain: str = "", **attributes: int | str | list[int]) -> Operator:
    return Operator(op_type, inputs, attributes, domain)


def number(dtype: str, value: float) -> Constant:
    return Constant(dtype, (), (value,))


def sizes(*values: int) -> Constant:
    """Return sizes, axes or places as operators read them."""
    return Constant("int64", (len(values),), values)


def columns_of(matrix: MatrixSpec, is_local: bool = False) -> Expression:
    """Return the int8 columns (K, N) that integer products read.

    is_local: whether a stored form that is read as it is has a name of its own in a branch.
    """
    if matrix.form == INT8_COLUMNS:
        return operator("Concat", "weights", axis=0) if is_local else "weights"
    return operator("Transpose", rows_of(matrix), perm=[1, 0])


def packed_of(matrix: MatrixSpec, is_local: bool = False) -> Expression:
    """Return the blocks (N, ⌈K / block⌉, bytes) that MatMulNBits reads. is_local: as in `columns_of`."""
    if matrix.is_packed:
        return operator("Concat", "weights", axis=0) if is_local else "weights"
    middle, missing = number("uint8", MIDDLE), -matrix.inner % matrix.block
    raised = operator("BitwiseXor", operator("Cast", rows_of(matrix), to=DATA_TYPE_UINT8), middle)
    filled = operator("Pad", raised, sizes(0, 0, 0, missing), middle) if missing else raised
    return operator("Reshape", filled, sizes(matrix.columns, -1, matrix.block))


def rows_of(matrix: MatrixSpec) -> Expression:
    """Return the int8 rows (N, K)."""
    if matrix.form == INT8_ROWS:
        return "weights"
    if matrix.form == INT8_COLUMNS:
        return operator("Transpose", "weights", perm=[1, 0])
    joined, filled = sizes(matrix.columns, -1), matrix.block
    if matrix.form == INT6_PLANES:
        planes, filled = zip(("weights", "lower"), _tables_of_6_bits(), strict=True), VALUES_OF_LOWER
        parts = [
            operator("Gather", table, operator("Cast", plane, to=DATA_TYPE_INT32), axis=0) for plane, table in planes
        ]
        whole = operator("BitwiseOr", *(operator("Reshape", part, joined) for part in parts))
    elif matrix.form == INT4_BLOCKS:
        # One lookup unpacks both numbers of a byte. onnxruntime would not compute the results of a DequantizeLinear
        # when it loads the file.
        code = operator("Mul", operator("Cast", "codes", to=DATA_TYPE_INT32), number("int32", CODE_STEP))
        byte = operator("Cast", "weights", to=DATA_TYPE_INT32)
        place = operator("Add", byte, operator("Unsqueeze", code, sizes(-1)))
        whole = operator("Reshape", operator("Gather", PAIRS, place, axis=0), joined)
    else:
        flipped = operator("BitwiseXor", "weights", number("uint8", MIDDLE))
        whole = operator("Reshape", operator("Cast", flipped, to=DATA_TYPE_INT8), joined)
    if matrix.inner % filled == 0:
        return whole
    return operator("Slice", whole, sizes(0), sizes(matrix.inner), sizes(1))


def block_scales_of(matrix: MatrixSpec) -> Expression:
    """Return the scales of blocks, float32 (N, ⌈K / block⌉), of the scales of columns."""
    if matrix.form != INT4_BLOCKS:
        return operator("Expand", "scale", sizes(1, matrix.blocks))
    fewer = operator("Cast", operator("BitwiseAnd", "codes", number("uint8", 7)), to=DATA_TYPE_FLOAT)
    return operator("Mul", operator("Add", fewer, number("float32", 1)), "scale")


def zero_points_of(matrix: MatrixSpec) -> Expression:
    """Return the zero points of blocks of 4 bits, two in a byte, uint8 (N, ⌈blocks / 2⌉); "" for other forms."""
    if matrix.form != INT4_BLOCKS:
        return ""
    zeros = operator("BitShift", "codes", number("uint8", 4), direction="RIGHT")  # z / 2, the upper half of a code
    if matrix.blocks % 2:
        zeros = operator("Pad", zeros, sizes(0, 0, 0, 1))
    pairs = operator("Cast", operator("Reshape", zeros, sizes(matrix.columns, -1, 2)), to=DATA_TYPE_INT32)
    placed = operator("Mul", pairs, Constant("int32", (2,), (1, 16)))
    return operator("Cast", operator("ReduceSum", placed, sizes(-1), keepdims=0), to=DATA_TYPE_UINT8)


@lru_cache(maxsize=1024)  # a file has a few kinds of products; files of strangers may have many
def product_of(scaling: RowScaling, inner: int, to_float: bool, has_bias: bool) -> Operator:
    """Return an integer product of `source` and `columns`, with `scale` and `bias`.

    to_float: whether it is a TO_FLOAT_PRODUCT, which scales by column.
    """
    rows, by_row = _rows_of_activations(scaling, inner)
    zero = number("uint8", scaling.zero)
    adds_bias = has_bias and not (to_float and scaling.fixed_scale)
    if to_float:
        own = by_row if scaling.fixed_scale else number("float32", 1)
        further = ("", "bias") if has_bias and not adds_bias else ()
        result = operator(TO_FLOAT_PRODUCT, rows, "columns", own, "scale", zero, *further, domain=CONTRIB)
        if not scaling.fixed_scale:
            result = operator("Mul", result, by_row)
    else:
        sums = operator("Cast", operator("MatMulInteger", rows, "columns", zero), to=DATA_TYPE_FLOAT)
        result = operator("Mul", operator("Mul", sums, by_row), "scale")
    return operator("Add", result, "bias") if adds_bias else result


def _rows_of_activations(scaling: RowScaling, inner: int) -> tuple[Expression, Expression]:
    """Return the integers of `source`, and the scale of each row or that of all rows."""
    zero = number("uint8", scaling.zero)
    if scaling.fixed_scale:
        fixed = number("float32", scaling.fixed_scale)
        return operator("QuantizeLinear", "source", fixed, zero), fixed
    values: Expression = operator("Abs", "source") if scaling.magnitude else "source"
    maximum = operator("ReduceMax", values, sizes(-1), keepdims=1)
    if scaling.floor:
        maximum = operator("Max", maximum, number("float32", scaling.floor))
    elif not scaling.magnitude:
        maximum = operator("Relu", maximum)
    if scaling.may_be_empty:  # for no rows, (0, K), onnxruntime 1.31 gives the maxima the shape (0, K) too
        maximum = operator("Slice", maximum, sizes(0), sizes(1), sizes(-1))
    scale = operator("Mul", maximum, number("float32", scaling.step))
    if scaling.reciprocal:
        ratio = operator("Mul", "source", operator("Reciprocal", scale))
        return operator("QuantizeLinear", ratio, number("float32", 1), zero), scale
    # The zero point of each row, computed as the integer of a number divided by infinity
    centres = operator("QuantizeLinear", maximum, number("float32", math.inf), zero)
    return operator("QuantizeLinear", "source", scale, centres, axis=-1, block_size=inner), scale


def _pairs() -> Operator:
    """Return the table that unpacks 4 bits: int8 (256 · 256, 2), m · q − ⌊m · z / 2⌋.

    Row 256 · code + byte has both numbers of the byte as weights of a block with this code. The table is derived from
    few numbers, because small files are hardly larger than the table.
    """
    q = Constant("int32", (16,), tuple(range(16)))
    m = Constant("int32", (8,), tuple(range(1, 9)))
    z = Constant("int32", (32, 1), tuple(range(32)))
    sides = [operator("Expand", operator("Unsqueeze", q, sizes(*axes)), sizes(16, 16, 1)) for axes in ((0, 2), (1, 2))]
    times = operator("Mul", operator("Unsqueeze", m, sizes(1, 2, 3)), operator("Concat", *sides, axis=-1))
    shift = operator("Div", operator("Mul", m, z), number("int32", 2))
    weights = operator("Sub", times, operator("Unsqueeze", shift, sizes(2, 3, 4)))  # (z, m, 16, 16, 2)
    return operator("Cast", operator("Reshape", weights, sizes(-1, 2)), to=DATA_TYPE_INT8)


PAIRS = _pairs()


@cache
def _tables_of_6_bits() -> list[Constant]:
    return [Constant("int8", table.shape, tuple(table.reshape(-1).tolist())) for table in tables_of_6_bits()]


def shown(expression: Expression) -> str:
    """Return an expression as a text, by which tests compare it with that of the web runtime."""
    if isinstance(expression, str):
        return expression
    if isinstance(expression, Constant):
        return f"{'×'.join(map(str, expression.shape))}: {' '.join(map(str, expression.values))}"
    attributes = "".join(
        f" {name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in sorted(expression.attributes.items())
    )
    return f"{expression.op_type}{attributes}({', '.join(map(shown, expression.inputs))})"
