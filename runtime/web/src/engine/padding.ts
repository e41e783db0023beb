/** Conversion of the rows of a request to the padded tensors and masks that the encode stage reads. */

import type { Backend, Tensor } from "../backend/session.js";
import { sizeOf, writeNumbers, type NumberArray, type TypedArray } from "../base/arrays.js";
import { InputError } from "../base/errors.js";
import type { EncodeStage, RequestInput } from "../format/manifest.js";
import { checkRow } from "../format/sizes.js";

export type Requests = ReadonlyMap<string, readonly NumberArray[]>; // request input → one array for each row

/**
 * Return name → tensor for every request input: rows padded to the longest, and masks derived from their lengths.
 *
 * requests: for each input that is not a mask, one array a row, without the batch axis; ids have one axis.
 * checked: whether the lengths of each row were checked (`checkRow`).
 * Throw InputError for a missing or unknown input, an empty row, or a row longer than the input's maximum, or a row
 * that `checkRow` refuses.
 */
export function paddedRequestTensors(
  backend: Backend,
  encode: EncodeStage,
  requests: Requests,
  rows: number,
  checked = false,
): Map<string, Tensor> {
  const specs = encode.inputs;
  const names = specs.filter((spec) => spec.role !== "mask").map((spec) => spec.name);
  if (names.length !== requests.size || !names.every((name) => requests.has(name))) {
    throw new InputError(
      `the model reads the inputs ${names.join(", ")}, not ${[...requests.keys()].join(", ") || "none"}`,
    );
  }
  const masked = new Set(specs.filter((spec) => spec.role === "mask").map((spec) => spec.of));
  const tensors = new Map<string, Tensor>();
  try {
    for (const spec of specs) {
      if (spec.role === "mask") continue;
      tensors.set(spec.name, padRows(backend, spec, requests.get(spec.name)!, rows, masked.has(spec.name)));
    }
    for (let row = 0; row < rows && !checked; row++) {
      checkRow(encode, new Map([...requests].map(([name, values]) => [name, values[row]])));
    }
    for (const spec of specs) {
      if (spec.role === "mask") tensors.set(spec.name, makeMask(backend, spec, requests, tensors, rows));
    }
    return tensors;
  } catch (error) {
    for (const tensor of tensors.values()) tensor.dispose();
    throw error;
  }
}

/**
 * Stack rows, padding every free axis at its end to the largest row.
 *
 * masked: whether the model has a mask of the rows. A time axis of one size is then padded to that size.
 */
function padRows(
  backend: Backend,
  spec: RequestInput,
  values: readonly NumberArray[],
  rows: number,
  masked: boolean,
): Tensor {
  if (values.length !== rows) {
    throw new InputError(`input ${spec.name} has ${values.length} rows where ${rows} are to be run`);
  }
  const axes = spec.shape.slice(1);
  for (const { shape } of values) {
    if (shape.length !== axes.length) {
      throw new InputError(`input ${spec.name} takes ${axes.length} axes a row, not ${shape.length}`);
    }
    if (sizeOf(shape) === 0) throw new InputError(`input ${spec.name} is empty`);
    if (spec.maxLength !== undefined && shape[0] > spec.maxLength) {
      throw new InputError(`input ${spec.name} is ${shape[0]} long and the model takes at most ${spec.maxLength}`);
    }
    shape.forEach((size, axis) => {
      const expected = axes[axis];
      const fits = typeof expected !== "number" || size === expected || (masked && axis === 0 && size < expected);
      if (!fits)
        throw new InputError(
          `input ${spec.name} has the shape (${shape.join(", ")}) where (${axes.join(", ")}) is needed`,
        );
    });
  }
  const shape = axes.map((expected, axis) =>
    axis === 0 && typeof expected === "number" ? expected : Math.max(...values.map((value) => value.shape[axis])),
  );
  const tensor = backend.tensor(spec.dtype, [rows, ...shape]);
  const data = tensor.data();
  if (spec.pad !== 0) fillNumber(data, spec.pad);
  const rowSize = sizeOf(shape);
  values.forEach((value, row) => writeBlock(data, row * rowSize, shape, value, 0, 0));
  return tensor;
}

/** Write an array to the beginning of each axis of a larger block. Return the place after the values read. */
export function writeBlock(
  target: TypedArray,
  to: number,
  shape: readonly number[],
  value: { readonly data: TypedArray; readonly shape: readonly number[] },
  from: number,
  axis: number,
): number {
  const last = axis >= shape.length - 1;
  const inner = last || shape.slice(axis + 1).every((size, i) => size === value.shape[axis + 1 + i]);
  if (inner) {
    const count = sizeOf(value.shape.slice(axis));
    writeNumbers(target, value.data.subarray(from, from + count) as Float32Array, to);
    return from + count;
  }
  const stride = sizeOf(shape.slice(axis + 1));
  for (let i = 0; i < value.shape[axis]; i++) from = writeBlock(target, to + i * stride, shape, value, from, axis + 1);
  return from;
}

function fillNumber(target: TypedArray, value: number): void {
  if (target instanceof BigInt64Array) target.fill(BigInt(value));
  else target.fill(value);
}

/** Return the mask of the valid positions of the input `of`: (batch, time), and further axes of size 1. */
function makeMask(
  backend: Backend,
  spec: RequestInput,
  requests: Requests,
  tensors: ReadonlyMap<string, Tensor>,
  rows: number,
): Tensor {
  const of = spec.of === undefined ? undefined : tensors.get(spec.of);
  if (of === undefined)
    throw new InputError(`input ${spec.name} is a mask of ${spec.of}, which is not an input of the model`);
  const time = of.dims[1];
  const shape = spec.shape.slice(1).map((axis) => (typeof axis === "string" ? time : axis));
  const tensor = backend.tensor(spec.dtype, [rows, ...shape]);
  const data = tensor.data();
  const values = requests.get(spec.of!)!;
  const valid = Float64Array.from({ length: rows * time }, (_, i) => {
    const isValid = i % time < values[Math.floor(i / time)].shape[0];
    return Number(isValid === spec.keep);
  });
  writeNumbers(data, valid);
  return tensor;
}
