/** The typed arrays of the manifest's types, and arrays of numbers with a shape. */

export type Dtype =
  "bool" | "uint8" | "int8" | "int16" | "int32" | "int64" | "float16" | "bfloat16" | "float32" | "float64";

export type TypedArray =
  Uint8Array | Int8Array | Int16Array | Uint16Array | Int32Array | BigInt64Array | Float32Array | Float64Array;

type TypedArrayClass = {
  new (length: number): TypedArray;
  new (buffer: ArrayBufferLike, offset: number, length: number): TypedArray;
  readonly BYTES_PER_ELEMENT: number;
};

/** Newer engines have a type of their own for float16, which onnxruntime then demands. */
const Float16 = ((globalThis as Record<string, unknown>)["Float16Array"] ?? Uint16Array) as TypedArrayClass;

const ARRAYS: Record<Dtype, TypedArrayClass> = {
  bool: Uint8Array,
  uint8: Uint8Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  float16: Float16,
  bfloat16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
};

export const DTYPES = Object.keys(ARRAYS) as readonly Dtype[];

/** Return the class of the arrays of a type. */
export function arrayClass(dtype: Dtype): TypedArrayClass {
  return ARRAYS[dtype];
}

/** Return the bytes of one number of a type. */
export function itemBytes(dtype: Dtype): number {
  return ARRAYS[dtype].BYTES_PER_ELEMENT;
}

/** Return the number of values of a shape. */
export function sizeOf(shape: readonly number[]): number {
  let size = 1;
  for (const axis of shape) size *= axis;
  return size;
}

/** Return the sum of values. */
export function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}

/** Append any number of values, which as arguments of `push` would have to fit on the stack. */
export function append<T>(target: T[], values: Iterable<T>): void {
  for (const value of values) target.push(value);
}

/** Write whole numbers to an array of any type. */
export function writeNumbers(target: TypedArray, values: ArrayLike<number>, offset = 0): void {
  if (target instanceof BigInt64Array) {
    for (let i = 0; i < values.length; i++) target[offset + i] = BigInt(values[i]);
  } else {
    target.set(values as ArrayLike<number>, offset);
  }
}

/** An array of numbers with a shape, in row-major order: what one row of an input or of an output is. */
export interface NumberArray {
  readonly data: Float32Array | Float64Array | Int32Array;
  readonly shape: readonly number[];
}

export function numberArray(data: Float32Array | Float64Array | Int32Array, shape: readonly number[]): NumberArray {
  return { data, shape };
}

/** Return the values of an output as numbers. int64 loses what 53 bits cannot hold, and outputs do not have. */
export function asNumbers(values: TypedArray, dtype: Dtype): Float32Array | Float64Array | Int32Array {
  if (values instanceof Float32Array || values instanceof Float64Array || values instanceof Int32Array) return values;
  if (values instanceof BigInt64Array) return Float64Array.from(values, Number);
  if (dtype === "bfloat16") {
    const bits = new Uint32Array(values.length);
    for (let i = 0; i < bits.length; i++) bits[i] = (values[i] as number) << 16;
    return new Float32Array(bits.buffer);
  }
  if (dtype === "float16" && values instanceof Uint16Array) return Float32Array.from(values, float16ToNumber);
  return Float32Array.from(values as ArrayLike<number>);
}

function float16ToNumber(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
