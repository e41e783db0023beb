/**
 * What a device offers: tensors, and sessions that run a graph on them. Node and WebAssembly share the base classes.
 *
 * All calls of onnxruntime go through the implementations of these interfaces. So each of onnxruntime's unrelated errors
 * becomes an error of `base/errors` in one place.
 */

import type { Dtype, TypedArray } from "../base/arrays.js";
import {
  DeviceError,
  errorSummary,
  InputError,
  ModelFileError,
  OutOfMemoryError,
  TformerError,
  UnsupportedCallError,
} from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";

/** A tensor that a session reads and writes. */
export interface Tensor {
  readonly dtype: Dtype;
  readonly dims: readonly number[];
  readonly byteLength: number;
  /**
   * Return the values, which a run of a session changes. They are valid until another tensor is made. A tensor in a
   * device's own memory has none.
   */
  data(): TypedArray;
  /** Set all values to 0. */
  clear(): void;
  /** Return the first rows as a tensor that shares this memory. It is disposed before this one. */
  rows(count: number): Tensor;
  /** Free the memory. */
  dispose(): void;
}

/** Inputs and outputs of a session, bound once for any number of runs. */
export interface Binding {
  /** Run the session. The result is a promise if the device computes in another thread than JavaScript. */
  run(): void | Promise<void>;
  /** Return an output for which no tensor was given, of the latest run. The caller disposes it. */
  output(name: string): Tensor;
  dispose(): void;
}

export type Inputs = ReadonlyMap<string, Tensor>;
/** Output → the tensor that a run overwrites; or where each run allocates one: for JavaScript, or where it computes. */
export type Outputs = ReadonlyMap<string, Tensor | "host" | "device">;

/**
 * A copy of equal parts of a tensor to another, or within one. Starts, strides and sizes are numbers of values.
 *
 * Part i is copied from `fromStart + i * fromStride` to `toStart + i * toStride`.
 */
export interface PartsCopy {
  readonly from: Tensor;
  readonly fromStart: number;
  readonly fromStride: number;
  readonly to: Tensor;
  readonly toStart: number;
  readonly toStride: number;
  readonly size: number;
  readonly parts: number;
}

export interface Session {
  bind(inputs: Inputs, outputs: Outputs): Binding;
  dispose(): void;
}

/** The weights of a model whose tensors refer to them. */
export interface Weights {
  /** Return the name of the file in the references; undefined if the model has its weights itself. */
  readonly location: string | undefined;
  readonly folder?: string;
  readonly bytes?: Uint8Array;
  /** Name of a second file with weights → its bytes. On the disk it is in the same folder. */
  readonly dataFiles?: ReadonlyMap<string, Uint8Array>;
}

export interface Backend {
  readonly device: DeviceName;
  /** Whether `weights` are mapped from a file on disk, or from bytes; the model must hold those of other sources. */
  readonly mapsWeights: "file" | "bytes";
  /** Return a tensor of zeros, which JavaScript reads and writes. Throw OutOfMemoryError. */
  tensor(dtype: Dtype, dims: readonly number[]): Tensor;
  /** Return a tensor of zeros where the device computes. Throw OutOfMemoryError. */
  deviceTensor(dtype: Dtype, dims: readonly number[]): Tensor;
  /** Return a tensor of zeros of the type of another one, where that is. Throw OutOfMemoryError. */
  tensorLike(tensor: Tensor, dims: readonly number[]): Tensor;
  /** Copy parts of tensors, one copy after the other. Both tensors of a copy are where the device computes, or neither is. */
  copyParts(copies: readonly PartsCopy[]): void;
  /** Open a graph. Throw ModelFileError if onnxruntime cannot read it. */
  open(model: Uint8Array, weights: Weights, manifest: Manifest, name: string): Promise<Session>;
}

export type DeviceName = "node" | "wasm" | "webgpu";

const OUT_OF_RANGE = /idx=(-?\d+) must be within the inclusive range \[(-?\d+),(-?\d+)\]/;
const NO_MEMORY = /allocate memory|bad.alloc|AllocateRaw|out of memory|Array buffer allocation failed|Cannot enlarge/i;

/** Return the TformerError for an error of onnxruntime. name: of the model file. */
export function translateError(error: unknown, name: string): TformerError {
  if (error instanceof TformerError) return error;
  const text = firstLine(error);
  if (NO_MEMORY.test(text)) {
    return new OutOfMemoryError(
      `there is not enough memory to run the model: give shorter inputs, or fewer at once (${text})`,
      undefined,
      error,
    );
  }
  const index = OUT_OF_RANGE.exec(text);
  if (index) {
    return new InputError(
      `${index[1]} is beyond one of the model's tables, which ends at ${index[3]}: an id outside its vocabulary, or ` +
        "an input that is too long",
      undefined,
      error,
    );
  }
  return new ModelFileError(`onnxruntime cannot run ${name}: ${text}`, undefined, error);
}

/** Return the TformerError for an error of opening a file. */
export function openingError(error: unknown, name: string): TformerError {
  const translated = translateError(error, name);
  if (!(error instanceof RangeError || translated instanceof OutOfMemoryError)) return translated;
  return new OutOfMemoryError(
    `there is not enough memory to load ${name}: dispose other models, or export a smaller or quantised model`,
    undefined,
    error,
  );
}

/** Return the first line of an error of onnxruntime, without its code. */
function firstLine(error: unknown): string {
  const text = String(error instanceof Error ? error.message : error).trim();
  const line = text.replace(/^.*?\[ONNXRuntimeError\] : \d+ : \w+ : /, "").split("\n")[0];
  return line ? line.slice(0, 300) : errorSummary(error);
}

/** Throw DeviceError for a file whose numbers this device cannot compute. */
export function checkPrecision(manifest: Manifest, name: string): void {
  if (manifest.precision === "bf16") {
    throw new DeviceError(
      `${name} computes in bfloat16, which onnxruntime does on CUDA alone: run it with the Python runtime, or export ` +
        "the model with another precision",
    );
  }
}

/** Return a tensor's dimensions with another number of rows. */
export function withRows(dims: readonly number[], count: number): number[] {
  return [count, ...dims.slice(1)];
}

/** Return the error of a call of a closed model. */
export function closedError(): UnsupportedCallError {
  return new UnsupportedCallError("the model is closed: load the file again with Model.load()");
}

/** Return the error of a tensor for which a memory has no room. memory: its name. */
export function noRoom(bytes: number, memory: string, cause?: unknown): OutOfMemoryError {
  return new OutOfMemoryError(
    `${bytes.toLocaleString("en-US")} bytes are needed at once, which ${memory} does not have: ask for fewer beams or ` +
      "sequences, or for fewer tokens",
    undefined,
    cause,
  );
}

/** A backend whose tensors are all in memory that JavaScript reads and writes. */
export abstract class HostBackend implements Backend {
  abstract readonly device: DeviceName;
  abstract readonly mapsWeights: "file" | "bytes";
  abstract tensor(dtype: Dtype, dims: readonly number[]): Tensor;
  abstract open(model: Uint8Array, weights: Weights, manifest: Manifest, name: string): Promise<Session>;

  deviceTensor(dtype: Dtype, dims: readonly number[]): Tensor {
    return this.tensor(dtype, dims);
  }

  tensorLike({ dtype }: Tensor, dims: readonly number[]): Tensor {
    return this.tensor(dtype, dims);
  }

  copyParts(copies: readonly PartsCopy[]): void {
    for (const { from, fromStart, fromStride, to, toStart, toStride, size, parts } of copies) {
      const [source, target] = [from.data(), to.data()];
      const isSame = source.buffer === target.buffer && source.byteOffset === target.byteOffset;
      for (let part = 0; part < parts; part++) {
        const [begin, place] = [fromStart + part * fromStride, toStart + part * toStride];
        if (isSame) target.copyWithin(place, begin, begin + size);
        else (target as Uint8Array).set(source.subarray(begin, begin + size) as Uint8Array, place);
      }
    }
  }
}

/** A session until its end. Handle: of the session in onnxruntime. name: of the model file. */
export abstract class HandledSession<Handle> implements Session {
  constructor(
    private open: Handle | undefined,
    protected readonly name: string,
  ) {}

  abstract bind(inputs: Inputs, outputs: Outputs): Binding;
  protected abstract release(handle: Handle): void;

  /** Throw UnsupportedCallError for a session that has ended. */
  get handle(): Handle {
    if (!this.open) throw closedError();
    return this.open;
  }

  dispose(): void {
    const { open } = this;
    this.open = undefined;
    if (open) this.release(open);
  }
}
