/** Lengths of one row along the free axes of the request inputs, and along the output axes that follow from them. */

import type { NumberArray } from "../base/arrays.js";
import { InputError } from "../base/errors.js";
import type { EncodeStage, RequestInput, Shape } from "./manifest.js";

export type Sources = ReadonlyMap<string, NumberArray>; // name of a request input → one row, without its batch axis
export type Sizes = ReadonlyMap<string, number>; // name of a free axis → length of one row there

/** Return the lengths of the free axes of one row's inputs. */
export function inputSizes(specs: readonly RequestInput[], sources: Sources): Map<string, number> {
  const sizes = new Map<string, number>();
  for (const spec of specs) {
    const source = sources.get(spec.name);
    if (source === undefined) continue;
    spec.shape.slice(1).forEach((axis, i) => {
      if (typeof axis === "string") sizes.set(axis, source.shape[i]);
    });
  }
  return sizes;
}

/**
 * Throw InputError for a row that is too short, or whose lengths do not go together.
 *
 * sources: the inputs, without their batch axis.
 */
export function checkRow(encode: EncodeStage, sources: Sources): void {
  const found = new Map<string, { name: string; size: number }>();
  for (const spec of encode.inputs) {
    const sizes = sources.get(spec.name)?.shape ?? [];
    spec.shape.slice(1).forEach((axis, i) => {
      if (typeof axis !== "string" || i >= sizes.length) return;
      const [size, least] = [sizes[i], encode.minLengths.get(axis) ?? 0];
      if (size < least) {
        throw new InputError(`input ${spec.name} is ${size} long and the model needs at least ${least}: lengthen it`);
      }
      const other = found.get(axis);
      if (other === undefined) found.set(axis, { name: spec.name, size });
      else if (other.size !== size) {
        throw new InputError(
          `the inputs ${other.name} and ${spec.name} are ${other.size} and ${size} long, and the model needs them ` +
            "equally long",
        );
      }
    });
  }
  for (const [axis, others] of encode.noLongerThan) {
    for (const [one, other] of others.map((other) => [found.get(axis), found.get(other)])) {
      if (one !== undefined && other !== undefined && one.size > other.size) {
        throw new InputError(
          `the inputs ${one.name} and ${other.name} are ${one.size} and ${other.size} long, and the model needs ` +
            `${one.name} to be no longer than ${other.name}`,
        );
      }
    }
  }
}

/** Return the lengths of `inputSizes`, and of the output axes that follow from them. */
export function inputAndOutputSizes(encode: EncodeStage, sources: Sources): Sizes {
  const sizes = inputSizes(encode.inputs, sources);
  for (const [name, length] of encode.derivedLengths) {
    const size = sizes.get(length.of) ?? 0;
    sizes.set(name, Math.max(0, Math.floor((size - length.minimum) / length.stride) + 1));
  }
  return sizes;
}

/**
 * Return a row's value without padding: each axis that `shape` names after an input's axis gets the row's size.
 *
 * data: values. The row begins at `offset`. full: the shape of the row there.
 */
export function crop<T extends Float32Array | Float64Array | Int32Array>(
  sizes: Sizes,
  shape: Shape,
  data: T,
  offset: number,
  full: readonly number[],
): { data: T; shape: number[] } {
  const kept = full.map((size, i) => {
    const axis = shape[i];
    return typeof axis === "string" ? Math.min(size, sizes.get(axis) ?? size) : size;
  });
  const count = kept.reduce((a, b) => a * b, 1);
  const out = new (data.constructor as new (length: number) => T)(count);
  copyBlock(data, offset, full, out, 0, kept, 0);
  return { data: out, shape: kept };
}

/** Copy the first `sizes` of each axis. Return the place after the copied values in `target`. */
function copyBlock(
  source: Float32Array | Float64Array | Int32Array,
  from: number,
  full: readonly number[],
  target: Float32Array | Float64Array | Int32Array,
  to: number,
  sizes: readonly number[],
  axis: number,
): number {
  if (axis === sizes.length || full.slice(axis).every((size, i) => size === sizes[axis + i])) {
    const count = sizes.slice(axis).reduce((a, b) => a * b, 1);
    target.set(source.subarray(from, from + count), to);
    return to + count;
  }
  const stride = full.slice(axis + 1).reduce((a, b) => a * b, 1);
  for (let i = 0; i < sizes[axis]; i++) to = copyBlock(source, from + i * stride, full, target, to, sizes, axis + 1);
  return to;
}
