/**
 * The context of requests with items, such as the images of a prompt. A request may have none.
 *
 * Each request with items is encoded alone, so that no request pays for the items of another. The other rows
 * of a request's context hold NaN, and there is at least one: the file takes them for "no item".
 */

import type { Backend, Tensor } from "../backend/session.js";
import { sizeOf, type Dtype, type TypedArray } from "../base/arrays.js";
import type { TensorSpec } from "../format/manifest.js";
import { writeBlock, type Requests } from "./padding.js";

const FLOAT16_NAN = 0x7e00;
const BFLOAT16_NAN = 0x7fc0;
const MISSING_ITEMS = 1; // at the end of the items of every request

/** Encodes the arrays of one request. The caller disposes the outputs. */
export type EncodeOne = (request: Requests) => Promise<Map<string, Tensor>>;

/**
 * Encode the requests that have items. Return the outputs of all rows by name, which the caller disposes.
 *
 * requests: for each request input, `rows` arrays (items, …); others, such as the number of an adapter, are encoded with
 *     these. names: of the inputs with items. outputs: those to return.
 */
export async function encodeItems(
  backend: Backend,
  requests: Requests,
  names: readonly string[],
  rows: number,
  outputs: readonly TensorSpec[],
  encode: EncodeOne,
): Promise<Map<string, Tensor>> {
  const parts: (Map<string, Tensor> | undefined)[] = [];
  const merged = new Map<string, Tensor>();
  try {
    for (let row = 0; row < rows; row++) {
      const hasItems = names.some((name) => sizeOf(requests.get(name)?.[row].shape ?? [0]));
      const own = new Map([...requests].map(([name, values]) => [name, [values[row]]]));
      parts.push(hasItems ? await encode(own) : undefined);
    }
    for (const spec of outputs) {
      const tensors = parts.map((part) => part?.get(spec.name));
      merged.set(spec.name, mergedRows(backend, spec, tensors));
    }
    return merged;
  } catch (error) {
    for (const tensor of merged.values()) tensor.dispose();
    throw error;
  } finally {
    for (const part of parts) for (const tensor of part?.values() ?? []) tensor.dispose();
  }
}

/** Return one tensor of all rows. parts: of each row, with a batch axis of 1; undefined for no items. */
function mergedRows(backend: Backend, spec: TensorSpec, parts: readonly (Tensor | undefined)[]): Tensor {
  const shape = spec.shape.slice(1).map((size, i) => {
    if (typeof size === "number") return size;
    return Math.max(0, ...parts.map((part) => part?.dims[i + 1] ?? 0)) + MISSING_ITEMS;
  });
  const merged = backend.tensor(spec.dtype, [parts.length, ...shape]);
  const data = merged.data();
  fillMissing(data, spec.dtype);
  parts.forEach((part, row) => {
    if (part) writeBlock(data, row * sizeOf(shape), shape, { data: part.data(), shape: part.dims.slice(1) }, 0, 0);
  });
  return merged;
}

function fillMissing(data: TypedArray, dtype: Dtype): void {
  if (data instanceof Uint16Array) data.fill(dtype === "bfloat16" ? BFLOAT16_NAN : FLOAT16_NAN);
  else if (dtype.startsWith("float")) (data as Float32Array).fill(NaN);
}
