/** Arrays of golden files and their comparison (docs/golden.md). It uses no code of the runtime, and runs in pages too. */

/** A value of a golden file. Its fields are those of docs/golden.md. */
export type Json = any;

export type Numbers = Float32Array | Float64Array | Int32Array;

/** An array with its shape, in the order of rows. */
export interface Values {
  readonly data: ArrayLike<number>;
  readonly shape: readonly number[];
}

export interface Stored extends Values {
  readonly data: Numbers;
}

/** Return the numbers of a pattern, which any language computes with whole numbers of 32 bits. */
export function pattern(seed: number, count: number): Float32Array {
  return Float32Array.from({ length: count }, (_, i) => {
    let h = Math.imul((i + seed) | 0, 0x9e3779b1);
    h = Math.imul(h ^ (h >>> 15), 0x85ebca6b);
    h ^= h >>> 13;
    return (h >>> 0) / 2 ** 31 - 1;
  });
}

/** Return the array of a golden file. */
export function decodeArray(json: Json): Stored {
  const shape = json.shape as number[];
  const count = shape.reduce((product, size) => product * size, 1);
  if ("pattern" in json) return { data: pattern(json.pattern as number, count), shape };
  if ("values" in json) return { data: Int32Array.from(json.values as number[]), shape };
  const bytes = bytesOf(json.base64 as string);
  const view = new DataView(bytes.buffer);
  if (json.dtype === "float32") {
    return { data: Float32Array.from({ length: count }, (_, i) => view.getFloat32(4 * i, true)), shape };
  }
  if (json.dtype === "float64") {
    return { data: Float64Array.from({ length: count }, (_, i) => view.getFloat64(8 * i, true)), shape };
  }
  throw new Error(`a golden file has an array of ${String(json.dtype)}`);
}

export function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** Return how an array differs from an expected one; undefined if it does not. tolerance: over the range of the numbers. */
export function arrayDifference(expected: Json, actual: Values, tolerance: number): string | undefined {
  if (`${actual.shape}` !== `${expected.shape}`) return `the shape is ${actual.shape}, not ${expected.shape}`;
  if (!("places" in expected)) {
    const { data } = decodeArray(expected);
    const span = data.length ? largest(data) - smallest(data) : 0;
    return numberDifference(data, actual.data, tolerance * (span || Math.max(1, largest(data.map(Math.abs)))));
  }
  const span = expected.maximum - expected.minimum;
  for (const [name, number] of [
    ["minimum", smallest(actual.data)],
    ["maximum", largest(actual.data)],
  ] as const) {
    if (!(Math.abs(number - expected[name]) <= tolerance * span)) {
      return `the ${name} is ${number}, not ${expected[name]}`;
    }
  }
  const { data } = decodeArray(expected.sample);
  const found = (expected.places as number[]).map((place) => actual.data[place]);
  return numberDifference(data, found, tolerance * (span || Math.max(1, largest(data.map(Math.abs)))));
}

/** Return the greatest difference of two arrays; undefined if it is allowed. Whole numbers have to be equal. */
export function numberDifference(expected: Numbers, actual: ArrayLike<number>, allowed: number): string | undefined {
  if (actual.length !== expected.length) return `there are ${actual.length} numbers, not ${expected.length}`;
  const most = expected instanceof Int32Array ? 0 : allowed;
  let worst = 0;
  let place = -1;
  for (let i = 0; i < expected.length; i++) {
    const difference = expected[i] === actual[i] ? 0 : Math.abs(expected[i] - actual[i]);
    if (difference <= worst) continue; // NaN is a difference too
    [worst, place] = [difference, i];
    if (Number.isNaN(difference)) break;
  }
  if (worst <= most) return undefined;
  return `number ${place} is ${actual[place]}, not ${expected[place]} (${most} may be between them)`;
}

/** Return how logits (length, vocabulary) of a row differ from expected ones. tolerance: over the range of a position. */
export function logitsDifference(expected: Json, actual: Values, tolerance: number): string | undefined {
  const width = actual.shape[1];
  const [low, high, values, top] = [expected.minimum, expected.maximum, expected.values, expected.top_values].map(
    (json) => decodeArray(json).data,
  );
  const columns = expected.columns as number[];
  for (const [row, position] of (expected.positions as number[]).entries()) {
    const allowed = tolerance * (high[row] - low[row]);
    const logits = Array.from({ length: width }, (_, column) => actual.data[position * width + column]);
    const ids = expected.top_ids[row] as number[];
    for (const [name, one, other] of [
      ["its logits", values.subarray(row * columns.length, (row + 1) * columns.length), columns.map((i) => logits[i])],
      ["its greatest logits", top.subarray(row * ids.length, (row + 1) * ids.length), ids.map((id) => logits[id])],
      ["its least logit", low.subarray(row, row + 1), [smallest(logits.filter(Number.isFinite))]],
      ["its greatest logit", high.subarray(row, row + 1), [largest(logits)]],
    ] as const) {
      const difference = numberDifference(one, other, allowed);
      if (difference) return `position ${position}: ${name}: ${difference}`;
    }
  }
  return undefined;
}

/** Return the first place at which two JSON values differ by more than rounding; undefined if there is none. */
export function jsonDifference(actual: Json, expected: Json, tolerance: number, place = ""): string | undefined {
  if (typeof expected === "number" && typeof actual === "number") {
    const areWhole = Number.isInteger(actual) && Number.isInteger(expected); // ids, and lengths of texts
    const allowed = areWhole ? 0 : tolerance * Math.max(1, Math.abs(expected));
    return Math.abs(actual - expected) <= allowed ? undefined : `${place} is ${actual}, not ${expected}`;
  }
  const isObject = (value: Json) => typeof value === "object" && value !== null;
  if (isObject(actual) && isObject(expected) && `${Object.keys(actual)}` === `${Object.keys(expected)}`) {
    for (const name of Object.keys(expected)) {
      const found = jsonDifference(actual[name], expected[name], tolerance, `${place}.${name}`);
      if (found) return found;
    }
    return undefined;
  }
  return actual === expected ? undefined : `${place} is ${JSON.stringify(actual)}, not ${JSON.stringify(expected)}`;
}

function largest(values: ArrayLike<number>): number {
  let most = -Infinity;
  for (let i = 0; i < values.length; i++) most = Math.max(most, values[i]);
  return most;
}

function smallest(values: ArrayLike<number>): number {
  let least = Infinity;
  for (let i = 0; i < values.length; i++) least = Math.min(least, values[i]);
  return least;
}
