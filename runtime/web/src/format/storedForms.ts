/**
 * Expressions of the operators that a graph has for the stored forms of weights.
 *
 * `tformer_runtime/format/stored_forms.py` defines them, with the form of each matrix. A test compares both modules.
 */

import type { Dtype } from "../base/arrays.js";
import type { MatrixSpec } from "./manifest.js";
import { DATA_TYPES } from "./onnxFields.js";
import type { Attribute } from "./onnxGraphEdit.js";

export const MIDDLE = 128; // the byte that stands for zero in blocks of 8 bits
const VALUES_OF_LOWER = 4; // of a byte of the lower plane of 6 bits

/** The numbers of a constant, nested as its axes are. */
export type Numbers = number | readonly Numbers[];

/** The name of a weight of the record, empty for no input; the numbers of a constant; or an operator. */
export type Expression = string | Numbers | Operator;

/** An operator of the standard, with exactly these attributes and inputs, and with one output. */
export interface Operator {
  readonly opType: string;
  readonly inputs: readonly Expression[];
  readonly attributes: Readonly<Record<string, Attribute>>;
}

function operator(opType: string, inputs: readonly Expression[], attributes: Operator["attributes"] = {}): Operator {
  return { opType, inputs, attributes };
}

/** Return whether an expression is a constant. */
export function isNumbers(expression: Expression): expression is Numbers {
  return typeof expression === "number" || Array.isArray(expression);
}

/** Return the sizes of the axes of a constant. */
export function shapeOf(numbers: Numbers): readonly number[] {
  return typeof numbers === "number" ? [] : [numbers.length, ...shapeOf(numbers[0]!)];
}

/** Return the numbers of a constant in their order. */
export function flatten(numbers: Numbers): readonly number[] {
  return typeof numbers === "number" ? [numbers] : numbers.flatMap(flatten);
}

function cast(value: Expression, dtype: Dtype): Operator {
  return operator("Cast", [value], { to: DATA_TYPES[dtype] });
}

/** Return whether MatMulNBits reads the stored form. */
export function isPacked({ form }: MatrixSpec): boolean {
  return form === "int8_blocks" || form === "int4_blocks";
}

/** Return the number of blocks of a column. */
export function blockCount({ inner, block }: MatrixSpec): number {
  return Math.ceil(inner / block);
}

/** Return a constant's name in expressions → its name in the graph, its type and its shape. */
export function constantsOf(matrix: MatrixSpec): ReadonlyMap<string, [string, Dtype, readonly number[]]> {
  const { form, inner, columns, block, weights, codes, lower } = matrix;
  const [blocks, groups] = [blockCount(matrix), Math.ceil(inner / VALUES_OF_LOWER)];
  const shapes = {
    int8_columns: [inner, columns],
    int8_rows: [columns, inner],
    int8_blocks: [columns, blocks, block],
    int4_blocks: [columns, blocks, Math.floor(block / 2)],
    int6_planes: [columns, 2 * groups],
  };
  const dtype = form === "int8_columns" || form === "int8_rows" ? "int8" : "uint8";
  const constants = new Map<string, [string, Dtype, readonly number[]]>([["weights", [weights, dtype, shapes[form]]]]);
  if (form === "int4_blocks") constants.set("codes", [codes ?? "", "uint8", [columns, blocks]]);
  if (form === "int6_planes") constants.set("lower", [lower ?? "", "uint8", [columns, groups]]);
  return constants;
}

/** Return the int8 columns (K, N) that integer products read. isLocal: whether a form that is read as it is has a copy. */
export function columnsOf(matrix: MatrixSpec, isLocal = false): Expression {
  if (matrix.form === "int8_columns") return isLocal ? operator("Concat", ["weights"], { axis: 0 }) : "weights";
  return operator("Transpose", [rowsOf(matrix)], { perm: [1, 0] });
}

/** Return the blocks (N, ⌈K / block⌉, bytes) that MatMulNBits reads. isLocal: as in `columnsOf`. */
export function packedOf(matrix: MatrixSpec, isLocal = false): Expression {
  const { inner, columns, block } = matrix;
  if (isPacked(matrix)) return isLocal ? operator("Concat", ["weights"], { axis: 0 }) : "weights";
  const missing = blockCount(matrix) * block - inner;
  const raised = operator("BitwiseXor", [cast(rowsOf(matrix), "uint8"), MIDDLE]);
  const filled = missing ? operator("Pad", [raised, [0, 0, 0, missing], MIDDLE]) : raised;
  return operator("Reshape", [filled, [columns, -1, block]]);
}

/** Return the int8 rows (N, K). */
function rowsOf(matrix: MatrixSpec): Expression {
  const { form, inner, columns, block } = matrix;
  if (form === "int8_rows") return "weights";
  if (form === "int8_columns") return operator("Transpose", ["weights"], { perm: [1, 0] });
  const joined = (value: Expression) => operator("Reshape", [value, [columns, -1]]);
  const looked = (table: Expression, place: Expression) => operator("Gather", [table, place], { axis: 0 });
  let whole: Expression;
  if (form === "int6_planes") {
    const [upper, lower] = TABLES_OF_6_BITS;
    const parts = [looked(upper, cast("weights", "int32")), looked(lower, cast("lower", "int32"))];
    whole = operator("BitwiseOr", parts.map(joined));
  } else if (form === "int4_blocks") {
    const begin = operator("Unsqueeze", [operator("Mul", [cast("codes", "int32"), 256]), [-1]]);
    whole = joined(looked(PAIRS, operator("Add", [cast("weights", "int32"), begin])));
  } else {
    whole = joined(cast(operator("BitwiseXor", ["weights", MIDDLE]), "int8"));
  }
  const filled = form === "int6_planes" ? VALUES_OF_LOWER : block;
  return inner % filled ? operator("Slice", [whole, [0], [inner], [1]]) : whole;
}

/** Return the scales of blocks (N, ⌈K / block⌉), of the scales of columns. */
export function blockScalesOf(matrix: MatrixSpec): Expression {
  if (matrix.form !== "int4_blocks") return operator("Expand", ["scale", [1, blockCount(matrix)]]);
  const fewer = cast(operator("BitwiseAnd", ["codes", 7]), "float32");
  return operator("Mul", [operator("Add", [fewer, 1]), "scale"]);
}

/** Return the zero points of blocks of 4 bits, two in a byte; "" for other forms. */
export function zeroPointsOf(matrix: MatrixSpec): Expression {
  if (matrix.form !== "int4_blocks") return "";
  const each = operator("BitShift", ["codes", 4], { direction: "RIGHT" });
  const even = blockCount(matrix) % 2 ? operator("Pad", [each, [0, 0, 0, 1]]) : each;
  const pairs = cast(operator("Reshape", [even, [matrix.columns, -1, 2]]), "int32");
  const both = operator("ReduceSum", [operator("Mul", [pairs, [1, 16]]), [-1]], { keepdims: 0 });
  return cast(both, "uint8");
}

/** The table of both weights of each byte in a block of each code: m · q − ⌊m · z / 2⌋. */
const PAIRS = (() => {
  const numbers = (first: number, count: number) => Array.from({ length: count }, (_, i) => first + i);
  const [q, m, z] = [numbers(0, 16), numbers(1, 8), numbers(0, 32).map((number) => [number])];
  const sides = [
    [0, 2],
    [1, 2],
  ].map((axes) => operator("Expand", [operator("Unsqueeze", [q, axes]), [16, 16, 1]]));
  const times = operator("Mul", [operator("Unsqueeze", [m, [1, 2, 3]]), operator("Concat", sides, { axis: -1 })]);
  const shift = operator("Div", [operator("Mul", [m, z]), 2]);
  const weights = operator("Sub", [times, operator("Unsqueeze", [shift, [2, 3, 4]])]);
  return cast(operator("Reshape", [weights, [-1, 2]]), "int8");
})();

/** The parts of weights of 6 bits that each byte of the two planes has. */
const TABLES_OF_6_BITS = (() => {
  const bytes = Array.from({ length: 256 }, (_, byte) => byte);
  const upper = bytes.map((byte) => [byte & 15, byte >> 4].map((part) => 4 * part - 32));
  return [upper, bytes.map((byte) => [0, 2, 4, 6].map((shift) => (byte >> shift) & 3))];
})();
