/** Sessions of onnxruntime-node: tensors are JavaScript's memory, which a run reads and writes without copies. */

import type * as Ort from "onnxruntime-node";
import { arrayClass, itemBytes, sizeOf, type Dtype, type TypedArray } from "../base/arrays.js";
import { DeviceError, MissingExtraError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import {
  checkPrecision,
  HandledSession,
  HostBackend,
  noRoom,
  openingError,
  translateError,
  withRows,
  type Backend,
  type Binding,
  type Inputs,
  type Outputs,
  type Session,
  type Tensor,
  type Weights,
} from "./session.js";

const NO_TELEMETRY = "ORT_DISABLE_TELEMETRY";

/**
 * Return the backend. threads: of one operator.
 *
 * Throw MissingExtraError without the package onnxruntime-node, and DeviceError in a thread that cannot switch off its telemetry.
 */
export async function nodeBackend(threads?: number): Promise<Backend> {
  let ort: typeof Ort;
  try {
    const module = (await import("onnxruntime-node")) as typeof Ort & { default?: typeof Ort };
    ort = module.default ?? module;
  } catch (error) {
    throw new MissingExtraError(
      "device node needs onnxruntime-node: npm install onnxruntime-node --ignore-scripts, or choose device wasm",
      undefined,
      error,
    );
  }
  await switchTelemetryOff(); // before the first session
  return new NodeBackend(ort, threads);
}

/**
 * Switch off the telemetry of onnxruntime, unless the user has decided about it.
 *
 * onnxruntime reads the variable when it makes the first session. Without it, it writes events about its use to a database in
 * the home folder, and sends them to Microsoft. A worker thread has a copy of the environment, which native code does not see.
 */
async function switchTelemetryOff(): Promise<void> {
  if (process.env[NO_TELEMETRY] !== undefined) return;
  const { isMainThread } = await import("node:worker_threads");
  if (!isMainThread) {
    throw new DeviceError(
      `device node would send onnxruntime's telemetry, which a worker thread cannot switch off: set ${NO_TELEMETRY} to 1 in ` +
        "the environment of the process or in process.env of its main thread, or choose device wasm",
    );
  }
  process.env[NO_TELEMETRY] = "1";
}

class NodeBackend extends HostBackend {
  readonly device = "node";
  readonly mapsWeights = "file";

  constructor(
    private readonly ort: typeof Ort,
    private readonly threads: number | undefined,
  ) {
    super();
  }

  tensor(dtype: Dtype, dims: readonly number[]): Tensor {
    return new NodeTensor(this.ort, dtype, dims, newArray(dtype, sizeOf(dims)));
  }

  async open(model: Uint8Array, weights: Weights, manifest: Manifest, name: string): Promise<Session> {
    checkPrecision(manifest, name);
    const settings = manifest.session;
    const session: Record<string, string> = {};
    if (!settings.spinning) session["intra_op.allow_spinning"] = "0";
    if (weights.folder !== undefined) session["model_external_initializers_file_folder_path"] = weights.folder;
    try {
      const opened = await this.ort.InferenceSession.create(model, {
        executionProviders: ["cpu"],
        intraOpNumThreads: this.threads ?? settings.threads ?? 0,
        logSeverityLevel: 4, // errors are thrown, so that logging them is redundant
        extra: { session, optimization: { disable_specified_optimizers: settings.disabledOptimizers.join(";") } },
      });
      return new NodeSession(this.ort, opened, name);
    } catch (error) {
      throw openingError(error, name);
    }
  }
}

class NodeTensor implements Tensor {
  readonly native: Ort.Tensor;

  constructor(
    private readonly ort: typeof Ort,
    readonly dtype: Dtype,
    readonly dims: readonly number[],
    private readonly array: TypedArray,
    native?: Ort.Tensor,
  ) {
    this.native = native ?? new ort.Tensor(dtype as "float32", array as Float32Array, [...dims]);
  }

  get byteLength(): number {
    return this.array.byteLength;
  }

  data(): TypedArray {
    return this.array;
  }

  clear(): void {
    (this.array as Uint8Array).fill(this.array instanceof BigInt64Array ? (0n as never) : 0);
  }

  rows(count: number): Tensor {
    const dims = withRows(this.dims, count);
    return new NodeTensor(this.ort, this.dtype, dims, this.array.subarray(0, sizeOf(dims)));
  }

  dispose(): void {} // the garbage collector frees it
}

class NodeSession extends HandledSession<Ort.InferenceSession> {
  constructor(
    private readonly ort: typeof Ort,
    session: Ort.InferenceSession,
    name: string,
  ) {
    super(session, name);
  }

  bind(inputs: Inputs, outputs: Outputs): Binding {
    return new NodeBinding(this.ort, this, this.name, inputs, outputs);
  }

  protected release(session: Ort.InferenceSession): void {
    void session.release();
  }
}

class NodeBinding implements Binding {
  private readonly feeds: Record<string, Ort.Tensor> = {};
  private readonly fetches: Record<string, Ort.Tensor | null> = {};
  private results: Ort.InferenceSession.OnnxValueMapType = {};

  constructor(
    private readonly ort: typeof Ort,
    private readonly session: NodeSession,
    private readonly name: string,
    inputs: Inputs,
    outputs: Outputs,
  ) {
    for (const [input, tensor] of inputs) this.feeds[input] = (tensor as NodeTensor).native;
    for (const [output, tensor] of outputs)
      this.fetches[output] = typeof tensor === "string" ? null : (tensor as NodeTensor).native;
  }

  async run(): Promise<void> {
    try {
      this.results = await this.session.handle.run(this.feeds, this.fetches);
    } catch (error) {
      throw translateError(error, this.name);
    }
  }

  output(name: string): Tensor {
    const native = this.results[name] as Ort.Tensor;
    return new NodeTensor(this.ort, native.type as Dtype, native.dims, native.data as TypedArray, native);
  }

  dispose(): void {
    this.results = {};
  }
}

function newArray(dtype: Dtype, size: number): TypedArray {
  try {
    return new (arrayClass(dtype))(size);
  } catch (error) {
    throw noRoom(size * itemBytes(dtype), "this machine", error);
  }
}
