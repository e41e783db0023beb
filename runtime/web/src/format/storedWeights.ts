/**
 * The integer weights of a product as a file stores them.
 *
 * A file holds each matrix once, and derives other forms by a few operators over constants
 * (`tformer_export/quantize/weight_storage.py`). This module recognises these operators, as
 * `tformer_runtime/format/stored_weights.py` does in Python.
 */

import { sizeOf, type Dtype } from "../base/arrays.js";
import type { Graph, Node } from "./onnxGraph.js";
import { integerAttributes, weightOf, type FileReader, type StoredTensor } from "./onnxGraphEdit.js";
import { columnsOf4Bits, columnsOf6Bits, spacedColumns, transposedColumns, type ColumnSizes } from "./weightForms.js";

const MIDDLE = 128; // the byte that stands for zero in packed weights of 8 bits

/** A graph with the nodes that compute its values, by name. */
export interface Scope {
  readonly graph: Graph;
  readonly producers: ReadonlyMap<string, Node>;
}

/** Weights (inner, columns). write: returns them as int8 columns; undefined if the file does not have their bytes. */
export interface StoredWeights {
  readonly inner: number;
  readonly columns: number;
  write(readFile: FileReader, sizes: ColumnSizes): Int8Array | undefined;
}

/** Return the weights of a MatMulNBits and the scale of each column; undefined if they are not as the exporter stores them. */
export function findPackedWeights(
  node: Node,
  scopes: readonly Scope[],
): { weights: StoredWeights; scale: StoredTensor } | undefined {
  const [, packedName, scalesName, zerosName] = node.inputs;
  const { K: inner, N: columns, bits, block_size: block } = integerAttributes(node);
  const packed = weight(scopes, packedName);
  const scales = producer(scopes, scalesName);
  if (!scales || !(inner > 0) || !(columns > 0) || !(block > 0)) return undefined;
  const sizes = [columns, Math.ceil(inner / block), (block * bits) / 8];
  if (packed && !isArray(packed, "uint8", sizes)) return undefined;
  let scale: StoredTensor | undefined;
  let weights: StoredWeights | undefined;
  if (bits === 8 && scales.opType === "Expand" && !zerosName) {
    scale = weight(scopes, scales.inputs[0]);
    weights = packed ? packed8(packed, inner) : repackedRows(scopes, packedName);
  } else if (bits === 4 && scales.opType === "Mul" && zerosName) {
    scale = weight(scopes, scales.inputs[1]);
    const codes = packed && codesOf(scopes, scales.inputs[0], zerosName);
    weights = codes && packed4(packed, codes, inner, true); // zero points of MatMulNBits are whole numbers
  }
  if (weights?.inner !== inner || weights.columns !== columns) return undefined;
  return scale && isArray(scale, "float32", [columns, 1]) ? { weights, scale } : undefined;
}

/** Return the weights of 6 bits from which packed ones of 8 bits are derived. */
function repackedRows(scopes: readonly Scope[], name: string): StoredWeights | undefined {
  const rows =
    above(scopes, name, ["Reshape", "BitwiseXor", "Cast"]) ??
    above(scopes, name, ["Reshape", "Pad", "BitwiseXor", "Cast"]);
  return rows === undefined ? undefined : derivedRows(scopes, rows);
}

/** Return the weights of an int8 value (inner, columns); undefined if they are not as the exporter stores them. */
export function findColumns(scopes: readonly Scope[], name: string): StoredWeights | undefined {
  const stored = weight(scopes, name);
  if (stored) return plain(stored);
  const node = producer(scopes, name);
  if (node?.opType === "Concat" && node.inputs.length === 1) {
    const same = weight(scopes, node.inputs[0]);
    return same && plain(same);
  }
  if (node?.opType !== "Transpose") return undefined;
  const rows = weight(scopes, node.inputs[0]);
  return rows ? transposed(rows) : derivedRows(scopes, node.inputs[0]);
}

function plain(tensor: StoredTensor): StoredWeights | undefined {
  const [inner, columns] = tensor.shape;
  if (!isArray(tensor, "int8", [inner, columns])) return undefined;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const values = tensor.read(readFile);
    return values && spacedColumns(values, sizes);
  };
  return { inner, columns, write };
}

function transposed(tensor: StoredTensor): StoredWeights | undefined {
  const [columns, inner] = tensor.shape;
  if (!isArray(tensor, "int8", [columns, inner])) return undefined;
  return { inner, columns, write: (readFile, sizes) => writeTransposed(tensor, inner, 0, readFile, sizes) };
}

/** Return packed weights of 8 bits, which are stored plus 128. */
function packed8(tensor: StoredTensor, inner: number): StoredWeights {
  const [columns, blocks, block] = tensor.shape;
  return {
    inner,
    columns,
    write: (readFile, sizes) => writeTransposed(tensor, blocks * block, MIDDLE, readFile, sizes),
  };
}

function writeTransposed(
  tensor: StoredTensor,
  rowBytes: number,
  middle: number,
  readFile: FileReader,
  sizes: ColumnSizes,
): Int8Array | undefined {
  const values = tensor.read(readFile);
  return values && transposedColumns(values, rowBytes, middle, sizes);
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
  return { inner, columns, write };
}

/** Return the weights of an int8 value (columns, inner) that is derived from packed ones. */
function derivedRows(scopes: readonly Scope[], name: string): StoredWeights | undefined {
  let node = producer(scopes, name);
  let end: number | undefined;
  if (node?.opType === "Slice") {
    end = smallInteger(scopes, node.inputs[2]);
    if (end === undefined) return undefined;
    node = producer(scopes, node.inputs[0]);
  }
  if (node?.opType === "BitwiseOr") return planesOf6Bits(scopes, node, end);
  if (node?.opType !== "Reshape") return undefined;
  const source = producer(scopes, node.inputs[0]);
  const place = source?.opType === "Gather" ? producer(scopes, source.inputs[1]) : undefined;
  if (source?.opType === "Gather" && place?.opType !== "Add") return undefined;
  const stored = place
    ? above(scopes, place.inputs[0], ["Cast"])
    : above(scopes, node.inputs[0], ["Cast", "BitwiseXor"]);
  const packed = stored === undefined ? undefined : weight(scopes, stored);
  if (packed?.dtype !== "uint8" || packed.shape.length !== 3) return undefined;
  const [, blocks, bytes] = packed.shape;
  const length = place ? 2 * bytes : bytes;
  const inner = end ?? blocks * length;
  if (inner > blocks * length || inner <= (blocks - 1) * length) return undefined;
  if (!place) return packed8(packed, inner);
  const coded = above(scopes, place.inputs[1], ["Unsqueeze", "Mul", "Cast"]);
  const codes = coded === undefined ? undefined : weight(scopes, coded);
  return codes && packed4(packed, codes, inner, false);
}

/** Return weights of 6 bits. end: their rows, without those that fill the last group of 4. */
function planesOf6Bits(scopes: readonly Scope[], node: Node, end: number | undefined): StoredWeights | undefined {
  const [upper, lower] = node.inputs.map((name) => {
    const gather = producer(scopes, above(scopes, name, ["Reshape"]) ?? "");
    const plane = gather?.opType === "Gather" ? above(scopes, gather.inputs[1], ["Cast"]) : undefined;
    return plane === undefined ? undefined : weight(scopes, plane);
  });
  const [columns, groups] = lower?.shape ?? [];
  if (!upper || !lower || !isArray(lower, "uint8", [columns, groups])) return undefined;
  const inner = end ?? 4 * groups;
  if (!isArray(upper, "uint8", [columns, 2 * groups]) || Math.ceil(inner / 4) !== groups) return undefined;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const [high, low] = [upper.read(readFile), lower.read(readFile)];
    return high && low && columnsOf6Bits(high, low, sizes);
  };
  return { inner, columns, write };
}

/** Return the codes from which both the multipliers and the zero points of blocks of 4 bits are derived. */
function codesOf(scopes: readonly Scope[], multipliers: string, zeros: string): StoredTensor | undefined {
  const masked = above(scopes, multipliers, ["Add", "Cast", "BitwiseAnd"]);
  const shifted =
    above(scopes, zeros, ["Cast", "ReduceSum", "Mul", "Cast", "Reshape", "BitShift"]) ??
    above(scopes, zeros, ["Cast", "ReduceSum", "Mul", "Cast", "Reshape", "Pad", "BitShift"]);
  return masked !== undefined && masked === shifted ? weight(scopes, masked) : undefined;
}

/** Return the first input of the last operator of a chain of first inputs; undefined if the operators are others. */
function above(scopes: readonly Scope[], name: string, operators: readonly string[]): string | undefined {
  let current: string | undefined = name;
  for (const operator of operators) {
    const node: Node | undefined = current === undefined ? undefined : producer(scopes, current);
    if (node?.opType !== operator) return undefined;
    current = node.inputs[0];
  }
  return current;
}

/** Return whether a tensor has this type and this shape. */
export function isArray({ dtype, shape }: StoredTensor, expected: Dtype, sizes: readonly number[]): boolean {
  return dtype === expected && shape.length === sizes.length && shape.every((size, i) => size === sizes[i]);
}

function producer(scopes: readonly Scope[], name: string): Node | undefined {
  const scope = scopes.find(({ graph, producers }) => graph.initializers.has(name) || producers.has(name));
  return scope?.producers.get(name);
}

/** Return a weight that has numbers; undefined for other values. */
export function weight(scopes: readonly Scope[], name: string): StoredTensor | undefined {
  const scope = scopes.find(({ graph, producers }) => graph.initializers.has(name) || producers.has(name));
  const found = scope && weightOf(scope.graph, name);
  return found && sizeOf(found.shape) > 0 ? found : undefined;
}

/** Return the only number of a small weight of int64. */
function smallInteger(scopes: readonly Scope[], name: string): number | undefined {
  const tensor = weight(scopes, name);
  const bytes = tensor && isArray(tensor, "int64", [1]) ? tensor.read(() => undefined) : undefined;
  return bytes && Number(new DataView(bytes.buffer, bytes.byteOffset, 8).getBigInt64(0, true));
}
