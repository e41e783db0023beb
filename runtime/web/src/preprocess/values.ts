/** The values that callers give as inputs, and what tells them apart. */

import { numberArray, sizeOf, type NumberArray } from "../base/arrays.js";
import { InputError, UnsupportedCallError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import type { AudioInput } from "./audio.js";
import type { ImageInput } from "./images.js";
import type { Pair } from "./textReader.js";

type Numbers = ArrayLike<number> | ArrayLike<bigint>;
/** Nested lists of numbers, a typed array, or a typed array with a shape. */
export type NumberInput = Numbers | readonly unknown[] | NumberArray;
/** A text, a pair of texts, ids or features, a decoded image, the images of a prompt, or a recording. */
export type Value = string | Pair | NumberInput | number | ImageInput | readonly ImageInput[] | AudioInput;
/** A value; for a model with several inputs, an object with the names of the inputs. */
export type Input = Value | Mapping;

export type Mapping = { readonly [name: string]: Value };

/** Return whether a value is a pair of texts. */
export function isPair(value: unknown): value is Pair {
  return Array.isArray(value) && value.length === 2 && value.every((part) => typeof part === "string");
}

/** Return whether a value is a text or a pair of texts. */
export function isText(value: unknown): value is string | Pair {
  return typeof value === "string" || isPair(value);
}

/** Return whether an input is an object with the names of inputs. */
export function isMapping(input: unknown): input is Mapping {
  if (typeof input !== "object" || input === null || Array.isArray(input) || ArrayBuffer.isView(input)) return false;
  if (isNumberArray(input) || isMedium(input)) return false;
  return Object.getPrototypeOf(input) === Object.prototype;
}

/** Return whether a value is a decoded image, or a recording with its rate. */
function isMedium(value: object): boolean {
  const has = (...names: string[]) => names.every((name) => name in value);
  return has("data", "width", "height") || has("samples", "samplingRate") || has("getChannelData");
}

function isNumberArray(value: unknown): value is NumberArray {
  const array = value as Partial<NumberArray> | null;
  return typeof value === "object" && ArrayBuffer.isView(array?.data) && Array.isArray(array?.shape);
}

/** Return numbers as an array with a shape; undefined for another value, such as rows of different lengths. */
export function arrayOf(value: unknown): NumberArray | undefined {
  if (isNumberArray(value)) return value.data.length === sizeOf(value.shape) ? value : undefined;
  if (ArrayBuffer.isView(value) && !(value instanceof DataView)) {
    const data = value as unknown as ArrayLike<number | bigint>;
    return numberArray(
      value instanceof Float32Array || value instanceof Int32Array
        ? value
        : Float64Array.from(data as ArrayLike<number>, Number),
      [data.length],
    );
  }
  if (!Array.isArray(value)) return undefined;
  const shape: number[] = [];
  for (let part: unknown = value; Array.isArray(part); part = part[0]) shape.push(part.length);
  const numbers: number[] = [];
  const collect = (part: unknown, axis: number): boolean => {
    if (axis === shape.length) {
      numbers.push(Number(part));
      return typeof part === "number" || typeof part === "bigint";
    }
    return Array.isArray(part) && part.length === shape[axis] && part.every((inner) => collect(inner, axis + 1));
  };
  return collect(value, 0) ? numberArray(Float64Array.from(numbers), shape) : undefined;
}

/** Return a prompt and its images as one input. Throw UnsupportedCallError for a model that reads no images in prompts. */
export function imagePrompt(manifest: Manifest, prompt: Input, images: readonly ImageInput[]): Input {
  const [name] = manifest.placeholders.keys();
  if (name === undefined) {
    throw new UnsupportedCallError(`this model (${manifest.task}) reads no images in its prompt: leave out images`);
  }
  if (isMapping(prompt)) {
    throw new InputError("the input is an object, which has its images already: leave out images");
  }
  return { [manifest.decode!.step.name]: prompt as Value, [name]: images };
}
