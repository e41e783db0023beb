/**
 * The integer weights of a product as a file stores them: found by their record, after the graph is compared with the
 * record's expressions, as `tformer_runtime/rewriting/stored_weights.py` does in Python.
 */

import type { Dtype } from "../base/arrays.js";
import type { MatrixSpec, ProductSpec } from "./manifest.js";
import type { Node } from "./onnxGraph.js";
import { attributesOf, type FileReader, type StoredTensor } from "./onnxGraphEdit.js";
import {
  blockCount,
  blockScalesOf,
  columnsOf,
  constantsOf,
  MIDDLE,
  packedOf,
  zeroPointsOf,
  type Expression,
} from "./storedForms.js";
import type { VisibleValues } from "./visibleValues.js";
import { columnsOf4Bits, columnsOf6Bits, spacedColumns, transposedColumns, type ColumnSizes } from "./weightForms.js";

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

/** Return the weights of a MatMulNBits and the scale of each column; undefined if they are not as their record says. */
export function findPackedWeights(
  node: Node,
  values: VisibleValues,
  spec: ProductSpec,
  matrix: MatrixSpec,
): { weights: StoredWeights; scale: StoredTensor } | undefined {
  const [, packed, scales, zeros] = node.inputs;
  const { inner, columns, block, form, weights: name } = matrix;
  const attributes = attributesOf(node);
  attributes.delete("accuracy_level");
  const sizes = { K: inner, N: columns, bits: form === "int4_blocks" ? 4 : 8, block_size: block };
  const fits = Object.entries(sizes).every(([key, size]) => attributes.get(key) === size);
  const scale = values.weight(spec.scale);
  if (!fits || attributes.size > 4 || !scale || !isArray(scale, "float32", [columns, 1])) return undefined;
  const tensors = findTensors(values, matrix);
  const found = new Map([...(tensors ?? []), ["scale", scale] as const]);
  const isStored =
    tensors !== undefined &&
    values.equals(packed, packedOf(matrix, packed !== name), found) &&
    values.equals(scales, blockScalesOf(matrix), found) &&
    values.equals(zeros ?? "", zeroPointsOf(matrix), found);
  return isStored ? { weights: storedWeights(matrix, tensors, true), scale } : undefined; // zero points are whole numbers
}

/** Return the weights of an int8 value (inner, columns); undefined if they are not as their record says. */
export function findColumns(values: VisibleValues, name: string, matrix: MatrixSpec): StoredWeights | undefined {
  const tensors = findTensors(values, matrix);
  const expression: Expression = columnsOf(matrix, name !== matrix.weights);
  return tensors && values.equals(name, expression, tensors) ? storedWeights(matrix, tensors, false) : undefined;
}

/** Return the weights of a record, by their names in expressions; undefined if one is not there, or of another shape. */
function findTensors(values: VisibleValues, matrix: MatrixSpec): Map<string, StoredTensor> | undefined {
  const tensors = new Map<string, StoredTensor>();
  for (const [key, [name, dtype, shape]] of constantsOf(matrix)) {
    const tensor = values.weight(name);
    if (!tensor || !isArray(tensor, dtype, shape)) return undefined;
    tensors.set(key, tensor);
  }
  return tensors;
}

/** hasWholeZeros: whether zero points of 4 bits are whole numbers, as those of MatMulNBits are. */
function storedWeights(
  matrix: MatrixSpec,
  tensors: ReadonlyMap<string, StoredTensor>,
  hasWholeZeros: boolean,
): StoredWeights {
  const { form, inner, columns, block } = matrix;
  const write = (readFile: FileReader, sizes: ColumnSizes) => {
    const [values, second]: (Uint8Array | undefined)[] = [...tensors.values()].map((tensor) => tensor.read(readFile));
    if (!values) return undefined;
    if (tensors.size > 1) {
      if (!second) return undefined;
      if (form === "int6_planes") return columnsOf6Bits(values, second, sizes);
      return columnsOf4Bits(values, second, { block, hasWholeZeros }, sizes);
    }
    if (form === "int8_columns") return spacedColumns(values, sizes);
    if (form === "int8_rows") return transposedColumns(values, inner, 0, sizes);
    return transposedColumns(values, blockCount(matrix) * block, MIDDLE, sizes);
  };
  const sources = [...tensors.values()].map((tensor) => tensor.encoded);
  return { inner, columns, sources, form: `${form} ${hasWholeZeros}`, write };
}

/** Return whether a tensor has this type and this shape. */
export function isArray({ dtype, shape }: StoredTensor, expected: Dtype, sizes: readonly number[]): boolean {
  return dtype === expected && shape.length === sizes.length && shape.every((size, i) => size === sizes[i]);
}
