/**
 * The integer weights of a product as a file stores them.
 *
 * A file holds each matrix once, and derives other forms by a few operators over constants
 * (`tformer_export/quantize/weight_storage.py`). This module recognises these operators with all of their constants, as
 * `tformer_runtime/rewriting/stored_weights.py` does in Python.
 */

import type { Dtype } from "../base/arrays.js";
import { operator, type Pattern, type VisibleValues } from "./graphPatterns.js";
import type { Node } from "./onnxGraph.js";
import { attributesOf, type FileReader, type StoredTensor } from "./onnxGraphEdit.js";
import { DATA_TYPES } from "./onnxFields.js";
import { columnsOf4Bits, columnsOf6Bits, spacedColumns, transposedColumns, type ColumnSizes } from "./weightForms.js";

const MIDDLE = 128; // the byte that stands for zero in packed weights of 8 bits
const PRODUCT_ATTRIBUTES = ["K", "N", "bits", "block_size", "accuracy_level"]; // of MatMulNBits

/**
 * Weights (inner, columns).
 *
 * sources: the encoded weights of the file that they are made of. form: how they are made of these.
 * write: returns them as int8 columns; undefined if the file does not have their bytes.
 */
export interface StoredWeights {
  readonly inner: number;
  readonly columns: number;
  readonly sources: readonly Uint8Array[];
  readonly form: string;
  write(readFile: FileReader, sizes: ColumnSizes): Int8Array | undefined;
}

/** Return the weights of a MatMulNBits and the scale of each column; undefined if they are not as the exporter stores them. */
export function findPackedWeights(
  node: Node,
  values: VisibleValues,
): { weights: StoredWeights; scale: StoredTensor } | undefined {
  const [, packedName, scalesName, zerosName] = node.inputs;
  const attributes = attributesOf(node);
  if ([...attributes.keys()].some((name) => !PRODUCT_ATTRIBUTES.includes(name))) return undefined;
  const [inner, columns, bits, block] = ["K", "N", "bits", "block_size"].map((name) => Number(attributes.get(name)));
  if (!(inner > 0 && columns > 0 && bits > 0 && block > 0)) return undefined;
  const blocks = Math.ceil(inner / block);
  const packed = values.weight(packedName);
  if (packed && !isArray(packed, "uint8", [columns, blocks, (block * bits) / 8])) return undefined;
  let scale: StoredTensor | undefined;
  let weights: StoredWeights | undefined;
  if (bits === 8 && !zerosName) {
    const scales = values.match(scalesName, operator("Expand", [{ weight: "scale" }, [1, blocks]]));
    scale = scales?.weights["scale"];
    weights = packed ? packed8(packed, inner) : repackedRows(values, packedName, inner, columns, block);
  } else if (bits === 4 && zerosName && packed) {
    const scales = values.match(scalesName, BLOCK_SCALES);
    const zeros = values.match(zerosName, blockZeros(columns, blocks % 2 > 0));
    const codes = scales?.weights["codes"];
    scale = scales?.weights["scale"];
    const areShared = codes !== undefined && codes.encoded === zeros?.weights["codes"].encoded;
    weights = areShared ? packed4(packed, codes, inner, true) : undefined; // zero points of MatMulNBits are whole numbers
  }
  if (weights?.inner !== inner || weights.columns !== columns) return undefined;
  return scale && isArray(scale, "float32", [columns, 1]) ? { weights, scale } : undefined;
}

/** Return the weights (inner, columns) whose rows are packed in 8 bits. */
function repackedRows(
  values: VisibleValues,
  name: string,
  inner: number,
  columns: number,
  block: number,
): StoredWeights | undefined {
  const missing = blocksRest(inner, block);
  const filled = missing ? operator("Pad", [RAISED_ROWS, [0, 0, 0, missing], [MIDDLE]]) : RAISED_ROWS;
  const match = values.match(name, operator("Reshape", [filled, [columns, -1, block]]));
  return match && findRows(values, match.values["rows"]);
}

/** Return the weights of an int8 value (inner, columns); undefined if they are not as the exporter stores them. */
export function findColumns(values: VisibleValues, name: string): StoredWeights | undefined {
  const stored = values.weight(name) ?? values.match(name, LOCAL_WEIGHT)?.weights["stored"];
  if (stored) return plain(stored);
  const rows = values.match(name, TRANSPOSED)?.values["source"];
  return rows === undefined ? undefined : findRows(values, rows);
}

/** Return the weights of an int8 value (columns, inner). */
function findRows(values: VisibleValues, name: string): StoredWeights | undefined {
  const stored = values.weight(name);
  if (stored) return transposed(stored);
  const source = values.match(name, TRANSPOSED)?.values["source"];
  const columns = source === undefined ? undefined : values.weight(source);
  if (columns) return plain(columns);
  const cut = values.match(name, operator("Slice", [{ value: "rows" }, [0], { numbers: "end" }, [1]]));
  const end = cut?.numbers["end"];
  if (end && end.length !== 1) return undefined;
  const whole = cut?.values["rows"] ?? name;
  return (
    rowsOf8Bits(values, whole, end?.[0]) ?? rowsOf4Bits(values, whole, end?.[0]) ?? rowsOf6Bits(values, whole, end?.[0])
  );
}

function plain(tensor: StoredTensor): StoredWeights | undefined {
  const [inner, columns] = tensor.shape;
  if (!isArray(tensor, "int8", [inner, columns])) return undefined;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const values = tensor.read(readFile);
    return values && spacedColumns(values, sizes);
  };
  return { inner, columns, sources: [tensor.encoded], form: "columns", write };
}

function transposed(tensor: StoredTensor): StoredWeights | undefined {
  const [columns, inner] = tensor.shape;
  return isArray(tensor, "int8", [columns, inner]) ? rowsOfBytes(tensor, inner, inner, 0) : undefined;
}

/** Return packed weights of 8 bits, which are stored plus 128. */
function packed8(tensor: StoredTensor, inner: number): StoredWeights {
  const [, blocks, block] = tensor.shape;
  return rowsOfBytes(tensor, inner, blocks * block, MIDDLE);
}

/** Return weights that are stored in rows of bytes. middle: stored for 0. */
function rowsOfBytes(tensor: StoredTensor, inner: number, rowBytes: number, middle: number): StoredWeights {
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const values = tensor.read(readFile);
    return values && transposedColumns(values, rowBytes, middle, sizes);
  };
  return { inner, columns: tensor.shape[0], sources: [tensor.encoded], form: `rows ${middle}`, write };
}

/** Return packed weights of 4 bits; undefined if the codes are of other blocks. */
function packed4(
  tensor: StoredTensor,
  codes: StoredTensor,
  inner: number,
  hasWholeZeros: boolean,
): StoredWeights | undefined {
  const [columns, blocks, half] = tensor.shape;
  if (!isArray(codes, "uint8", [columns, blocks])) return undefined;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const [values, numbers] = [tensor.read(readFile), codes.read(readFile)];
    return values && numbers && columnsOf4Bits(values, numbers, { block: 2 * half, hasWholeZeros }, sizes);
  };
  return { inner, columns, sources: [tensor.encoded, codes.encoded], form: `4 bits ${hasWholeZeros}`, write };
}

/** Return weights whose rows are derived from packed ones of 8 bits. end: their rows, if the last block has more. */
function rowsOf8Bits(values: VisibleValues, name: string, end: number | undefined): StoredWeights | undefined {
  const match = values.match(name, ROWS_OF_8_BITS);
  const packed = match?.weights["packed"];
  if (!packed || !isArray(packed, "uint8", blocksOf(packed, match.numbers["sizes"]))) return undefined;
  const [, blocks, block] = packed.shape;
  const inner = end ?? blocks * block;
  return isInLastBlock(inner, blocks, block) ? packed8(packed, inner) : undefined;
}

function rowsOf4Bits(values: VisibleValues, name: string, end: number | undefined): StoredWeights | undefined {
  const match = values.match(name, ROWS_OF_4_BITS);
  const packed = match?.weights["packed"];
  if (!packed || !isArray(packed, "uint8", blocksOf(packed, match.numbers["sizes"]))) return undefined;
  const [, blocks, half] = packed.shape;
  const inner = end ?? blocks * half * 2;
  return isInLastBlock(inner, blocks, half * 2) ? packed4(packed, match.weights["codes"], inner, false) : undefined;
}

function rowsOf6Bits(values: VisibleValues, name: string, end: number | undefined): StoredWeights | undefined {
  const match = values.match(name, ROWS_OF_6_BITS);
  if (!match) return undefined;
  const { upper, lower } = match.weights;
  const [columns, groups] = lower.shape;
  const inner = end ?? 4 * groups;
  const sizes = [match.numbers["upperSizes"], match.numbers["lowerSizes"]];
  if (!isArray(lower, "uint8", [columns, groups]) || !isArray(upper, "uint8", [columns, 2 * groups])) return undefined;
  if (!sizes.every((size) => isRows(size, columns)) || !isInLastBlock(inner, groups, 4)) return undefined;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const [high, low] = [upper.read(readFile), lower.read(readFile)];
    return high && low && columnsOf6Bits(high, low, sizes);
  };
  return { inner, columns, sources: [upper.encoded, lower.encoded], form: "6 bits", write };
}

/** Return the shape of packed weights whose rows a Reshape joins; an impossible one if it does something else. */
function blocksOf({ shape }: StoredTensor, sizes: readonly number[]): readonly number[] {
  const [columns, blocks, bytes] = shape;
  return isRows(sizes, columns) ? [columns, blocks, bytes] : [];
}

function isRows(sizes: readonly number[], columns: number): boolean {
  return sizes.length === 2 && sizes[0] === columns && sizes[1] === -1;
}

function isInLastBlock(inner: number, blocks: number, block: number): boolean {
  return inner <= blocks * block && inner > (blocks - 1) * block;
}

/** Return the rows that are missing in the last block. */
function blocksRest(inner: number, block: number): number {
  return Math.ceil(inner / block) * block - inner;
}

/** Return whether a tensor has this type and this shape. */
export function isArray({ dtype, shape }: StoredTensor, expected: Dtype, sizes: readonly number[]): boolean {
  return dtype === expected && shape.length === sizes.length && shape.every((size, i) => size === sizes[i]);
}

// What the exporter writes.

const [TO_INT8, TO_UINT8, TO_INT32, TO_FLOAT] = (["int8", "uint8", "int32", "float32"] as const).map((dtype) => ({
  to: DATA_TYPES[dtype],
}));
const CODES: Pattern = { weight: "codes" };
const LOCAL_WEIGHT = operator("Concat", [{ weight: "stored" }], { axis: 0 }); // a copy for a branch
const TRANSPOSED = operator("Transpose", [{ value: "source" }], { perm: [1, 0] });
const RAISED_ROWS = operator("BitwiseXor", [operator("Cast", [{ value: "rows" }], TO_UINT8), [MIDDLE]]);

/** The scales of blocks of 4 bits. */
const BLOCK_SCALES = operator("Mul", [
  operator("Add", [operator("Cast", [operator("BitwiseAnd", [CODES, [7]])], TO_FLOAT), [1]]),
  { weight: "scale" },
]);

/** Return the pattern of the zero points of blocks of 4 bits, two in a byte. isOdd: whether the blocks of a column are. */
function blockZeros(columns: number, isOdd: boolean): Pattern {
  const each = operator("BitShift", [CODES, [4]], { direction: "RIGHT" });
  const even = isOdd ? operator("Pad", [each, [0, 0, 0, 1]]) : each;
  const pairs = operator("Cast", [operator("Reshape", [even, [columns, -1, 2]])], TO_INT32);
  const both = operator("ReduceSum", [operator("Mul", [pairs, [1, 16]]), [-1]], { keepdims: 0 });
  return operator("Cast", [both], TO_UINT8);
}

const ROWS_OF_8_BITS = operator("Reshape", [
  operator("Cast", [operator("BitwiseXor", [{ weight: "packed" }, [MIDDLE]])], TO_INT8),
  { numbers: "sizes" },
]);

/** The table of both weights of each byte in a block of each code: m · q − ⌊m · z / 2⌋. */
const PAIRS = (() => {
  const numbers = (first: number, count: number) => Array.from({ length: count }, (_, i) => first + i);
  const [q, m, z] = [numbers(0, 16), numbers(1, 8), numbers(0, 32)];
  const sides = [
    [0, 2],
    [1, 2],
  ].map((axes) => operator("Expand", [operator("Unsqueeze", [q, axes]), [16, 16, 1]]));
  const times = operator("Mul", [operator("Unsqueeze", [m, [1, 2, 3]]), operator("Concat", sides, { axis: -1 })]);
  const shift = operator("Div", [operator("Mul", [m, z]), [2]]);
  const weights = operator("Sub", [times, operator("Unsqueeze", [shift, [2, 3, 4]])]);
  return operator("Cast", [operator("Reshape", [weights, [-1, 2]])], TO_INT8);
})();

const ROWS_OF_4_BITS = operator("Reshape", [
  operator(
    "Gather",
    [
      PAIRS,
      operator("Add", [
        operator("Cast", [{ weight: "packed" }], TO_INT32),
        operator("Unsqueeze", [operator("Mul", [operator("Cast", [CODES], TO_INT32), [256]]), [-1]]),
      ]),
    ],
    { axis: 0 },
  ),
  { numbers: "sizes" },
]);

/** The rows of weights of 6 bits: two planes, each by a table of the parts of the weights that a byte has. */
const ROWS_OF_6_BITS = (() => {
  const bytes = Array.from({ length: 256 }, (_, byte) => byte);
  const upperParts = bytes.flatMap((byte) => [byte & 15, byte >> 4].map((part) => 4 * part - 32));
  const lowerParts = bytes.flatMap((byte) => [0, 2, 4, 6].map((shift) => (byte >> shift) & 3));
  const rows = (plane: string, table: readonly number[]) =>
    operator("Reshape", [
      operator("Gather", [table, operator("Cast", [{ weight: plane }], TO_INT32)], { axis: 0 }),
      { numbers: `${plane}Sizes` },
    ]);
  return operator("BitwiseOr", [rows("upper", upperParts), rows("lower", lowerParts)]);
})();
