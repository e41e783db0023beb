/**
 * Sessions of onnxruntime's WebAssembly module, called by itself: tensors live in the module's heap.
 *
 * The public API of onnxruntime-web copies each input into the heap and each output out of it at every run. Caches are
 * then copied at each token. Here they stay in the heap, past and present are one tensor, and names and handles are
 * written once for all runs of a binding. The functions of the module are not part of the public API of onnxruntime-web.
 * So its version is pinned, and tests run them.
 */

import { arrayClass, itemBytes, sizeOf, type Dtype, type TypedArray } from "../base/arrays.js";
import { DeviceError, type TformerError } from "../base/errors.js";
import { DATA_TYPES } from "../format/onnxFields.js";
import type { Manifest } from "../format/manifest.js";
import { readingFile } from "../format/modelFile.js";
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
  type DeviceName,
  type Inputs,
  type Outputs,
  type Session,
  type Tensor,
  type Weights,
} from "./session.js";

/** The functions of the module that are used here: onnxruntime-web/lib/wasm/wasm-types.ts. */
export interface OrtModule {
  readonly HEAPU8: Uint8Array;
  _malloc(size: number): number;
  _free(pointer: number): void;
  stackSave(): number;
  stackRestore(stack: number): void;
  stackAlloc(size: number): number;
  getValue(pointer: number, type: string): number;
  setValue(pointer: number, value: number, type: string): void;
  UTF8ToString(pointer: number): string;
  lengthBytesUTF8(text: string): number;
  stringToUTF8(text: string, pointer: number, size: number): void;
  mountExternalData(path: string, data: Uint8Array): void;
  unmountExternalData(): void;
  _OrtInit(threads: number, logLevel: number): number;
  _OrtGetLastError(code: number, message: number): number;
  _OrtCreateSessionOptions(
    graphOptimizationLevel: number,
    enableCpuMemArena: boolean,
    enableMemPattern: boolean,
    executionMode: number,
    enableProfiling: boolean,
    profileFilePrefix: number,
    logId: number,
    logSeverityLevel: number,
    logVerbosityLevel: number,
    optimizedModelFilePath: number,
  ): number;
  _OrtAddSessionConfigEntry(options: number, key: number, value: number): number;
  _OrtReleaseSessionOptions(options: number): number;
  _OrtCreateSession(data: number, size: number, options: number): number | Promise<number>;
  _OrtReleaseSession(session: number): number;
  _OrtCreateTensor(type: number, data: number, bytes: number, dims: number, rank: number, location: number): number;
  _OrtGetTensorData(tensor: number, type: number, data: number, dims: number, rank: number): number;
  _OrtReleaseTensor(tensor: number): number;
  _OrtFree(pointer: number): number;
  _OrtRun(
    session: number,
    inputNames: number,
    inputs: number,
    inputCount: number,
    outputNames: number,
    outputCount: number,
    outputs: number,
    options: number,
  ): number | Promise<number>;
}

/** Makes the module: the default export of onnxruntime-web's script. */
export type OrtFactory = (settings: Record<string, unknown>) => Promise<OrtModule>;

/** How the module is loaded, once for all models. */
export interface WasmOptions {
  /** Threads of one operator: more than 1 needs a page that is cross-origin isolated. */
  threads?: number;
  /**
   * The address of ort-wasm-simd-threaded.wasm, for webgpu of ort-wasm-simd-threaded.asyncify.wasm; by default it is next to
   * onnxruntime-web's script.
   */
  wasmUrl?: string | URL;
  /** The bytes of this file. */
  wasmBinary?: ArrayBuffer | Uint8Array;
}

const ALIGNMENT_BYTES = 64; // kernels read whole vectors
export const POINTER_BYTES = 4;
const MEMORY_BYTES = 2 ** 32; // that addresses reach
export const LOCATION_CPU = 1; // of onnxruntime-web/lib/wasm/wasm-common.ts
const MAX_DEFAULT_THREADS = 4;

let loading: Promise<Heap> | undefined;

/** Return the backend. The first call loads the module, and its options hold for all later ones. */
export async function wasmBackend(options: WasmOptions = {}): Promise<Backend & { readonly heapBytes: number }> {
  checkThreads(options.threads);
  const own = (loading ??= loadHeap(options, () => import("onnxruntime-web/ort-wasm-simd-threaded.mjs" as string)));
  const forget = () => {
    if (loading === own) loading = undefined; // and not a module that was loaded since
  };
  try {
    const heap = await own;
    heap.onTrap = forget; // its memory is in no known state: another one is loaded
    return new WasmBackend(heap);
  } catch (error) {
    forget(); // a later call may have a better address
    if (error instanceof DeviceError) throw error;
    throw new DeviceError(`device wasm is not available: ${String(error instanceof Error ? error.message : error)}`);
  }
}

/** Throw DeviceError for threads in a page that may have none: onnxruntime would wait for them for ever. */
export function checkThreads(threads: number | undefined): void {
  const isolated = (globalThis as { crossOriginIsolated?: boolean }).crossOriginIsolated; // undefined in Node
  if (threads === undefined || threads === 1 || isolated !== false) return;
  throw new DeviceError(
    `threads: ${threads} needs a page that is isolated from other sites: have the server send the headers ` +
      "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp, or leave threads out",
  );
}

/** Load a module of onnxruntime-web. load: its script. */
export async function loadHeap(options: WasmOptions, load: () => Promise<unknown>): Promise<Heap> {
  const threads = options.threads ?? defaultThreads();
  const { default: factory } = (await load()) as { default: OrtFactory };
  const settings: Record<string, unknown> = { numThreads: threads };
  if (options.wasmBinary) settings["wasmBinary"] = options.wasmBinary;
  if (options.wasmBinary) settings["locateFile"] = (file: string) => file;
  else if (options.wasmUrl) {
    settings["locateFile"] = (file: string) => (file.endsWith(".wasm") ? String(options.wasmUrl) : file);
  }
  const module = await factory(settings);
  const heap = new Heap(module);
  if (module._OrtInit(threads, 4)) throw new DeviceError(`onnxruntime cannot start: ${heap.lastError()}`);
  return heap;
}

function defaultThreads(): number {
  const isolated = (globalThis as { crossOriginIsolated?: boolean }).crossOriginIsolated === true;
  const cores = globalThis.navigator?.hardwareConcurrency ?? 1;
  return isolated ? Math.max(1, Math.min(MAX_DEFAULT_THREADS, Math.ceil(cores / 2))) : 1;
}

/** The module's heap: memory, texts and errors. */
export class Heap {
  private readonly names = new Map<string, number>(); // texts that stay, for names of inputs and outputs
  /** Called after a trap. */
  onTrap = () => {};

  constructor(readonly module: OrtModule) {}

  allocate(bytes: number): number {
    const pointer = bytes < MEMORY_BYTES ? this.module._malloc(bytes) >>> 0 : 0; // of more it takes the lower 32 bits
    if (!pointer) throw noRoom(bytes, "WebAssembly's memory");
    return pointer;
  }

  /** Return the place of a text that stays in the heap. */
  name(text: string): number {
    let pointer = this.names.get(text);
    if (pointer === undefined) {
      const bytes = this.module.lengthBytesUTF8(text) + 1;
      pointer = this.allocate(bytes);
      this.module.stringToUTF8(text, pointer, bytes);
      this.names.set(text, pointer);
    }
    return pointer;
  }

  pointerAt(place: number): number {
    return this.module.getValue(place, "*") >>> 0;
  }

  lastError(): string {
    const { module } = this;
    const stack = module.stackSave();
    const place = module.stackAlloc(2 * POINTER_BYTES);
    module._OrtGetLastError(place, place + POINTER_BYTES);
    const message = this.pointerAt(place + POINTER_BYTES);
    const text = message ? module.UTF8ToString(message) : "unknown error";
    module.stackRestore(stack);
    return text;
  }

  /** Return the TformerError for an error of the module. name: of the model file. */
  errorOf(error: unknown, name: string): TformerError {
    if (error instanceof WebAssembly.RuntimeError) this.onTrap();
    return translateError(error, name);
  }

  /** Throw the latest error of the module if a call returned a code of one. */
  check(code: number): void {
    if (code) throw new Error(this.lastError());
  }

  /** Return a handle of a tensor. pointer: its place in the heap; elsewhere what `location` says. */
  wrap(dtype: Dtype, dims: readonly number[], pointer: number, location = LOCATION_CPU): number {
    const { module } = this;
    const stack = module.stackSave();
    const place = module.stackAlloc(POINTER_BYTES * Math.max(1, dims.length));
    dims.forEach((size, i) => module.setValue(place + POINTER_BYTES * i, size, "i32"));
    const bytes = sizeOf(dims) * itemBytes(dtype);
    const handle = module._OrtCreateTensor(DATA_TYPES[dtype], pointer, bytes, place, dims.length, location) >>> 0;
    module.stackRestore(stack);
    if (!handle) throw translateError(new Error(this.lastError()), "the model");
    return handle;
  }
}

export class WasmBackend extends HostBackend {
  readonly device: DeviceName = "wasm";
  readonly mapsWeights = "bytes";

  constructor(protected readonly heap: Heap) {
    super();
  }

  /** The bytes of the module's memory, which grows and never shrinks. */
  get heapBytes(): number {
    return this.heap.module.HEAPU8.length;
  }

  tensor(dtype: Dtype, dims: readonly number[]): Tensor {
    const bytes = sizeOf(dims) * itemBytes(dtype);
    const raw = this.heap.allocate(bytes + ALIGNMENT_BYTES);
    const pointer = Math.ceil(raw / ALIGNMENT_BYTES) * ALIGNMENT_BYTES;
    this.heap.module.HEAPU8.fill(0, pointer, pointer + bytes);
    try {
      return new WasmTensor(this.heap, dtype, dims, pointer, raw);
    } catch (error) {
      this.heap.module._free(raw);
      throw error;
    }
  }

  async open(model: Uint8Array, weights: Weights, manifest: Manifest, name: string): Promise<Session> {
    checkPrecision(manifest, name);
    const [fastModel, allWeights] = await withFastProducts(model, weights, manifest, name);
    return new WasmSession(this.heap, await this.openHandle(fastModel, allWeights, manifest, name), name);
  }

  /** Return the handle of a new session. addProvider: adds an execution provider to session options. */
  protected async openHandle(
    model: Uint8Array,
    weights: Weights,
    manifest: Manifest,
    name: string,
    addProvider?: (options: number) => Promise<void>,
  ): Promise<number> {
    const { heap } = this;
    const { module } = heap;
    let place = 0;
    let options = 0;
    try {
      place = heap.allocate(model.length);
      module.HEAPU8.set(model, place);
      const hasPattern = !addProvider; // memory patterns are of the CPU
      options = module._OrtCreateSessionOptions(99, true, hasPattern, 0, false, 0, 0, 4, 0, 0);
      if (!options) throw new Error(heap.lastError());
      const disabled = manifest.session.disabledOptimizers.join(";");
      const key = heap.name("optimization.disable_specified_optimizers");
      heap.check(module._OrtAddSessionConfigEntry(options, key, heap.name(disabled)));
      await addProvider?.(options);
      if (weights.location !== undefined && weights.bytes) module.mountExternalData(weights.location, weights.bytes);
      for (const [file, bytes] of weights.dataFiles ?? []) module.mountExternalData(file, bytes);
      const session = (await module._OrtCreateSession(place, model.length, options)) >>> 0;
      if (!session) throw new Error(heap.lastError());
      return session;
    } catch (error) {
      throw openingError(heap.errorOf(error, name), name);
    } finally {
      module.unmountExternalData();
      if (options) module._OrtReleaseSessionOptions(options);
      if (place) module._free(place);
    }
  }
}

/** Return the model with the products that are fast in WebAssembly, and its weights with theirs. */
async function withFastProducts(
  model: Uint8Array,
  weights: Weights,
  { storedProducts }: Manifest,
  name: string,
): Promise<[Uint8Array, Weights]> {
  const { withIntegerProducts } = await import("../format/productRewrite.js"); // a page with workers needs no code of it
  const { location, bytes, dataFiles } = weights;
  const read = (file: string) => (file === location ? bytes : dataFiles?.get(file));
  const rewritten = readingFile(name, () => {
    try {
      return withIntegerProducts(model, read, storedProducts);
    } catch (error) {
      if (error instanceof RangeError) throw openingError(error, name); // of an array
      throw error;
    }
  });
  if (!rewritten.files.size) return [rewritten.model, weights];
  return [rewritten.model, { ...weights, dataFiles: new Map([...(dataFiles ?? []), ...rewritten.files]) }];
}

/** A tensor of the module. */
export interface HandledTensor extends Tensor {
  readonly handle: number;
}

export class WasmTensor implements HandledTensor {
  handle: number;
  private view: TypedArray | undefined;

  /** raw: memory to free with the tensor; 0 if another owns it. */
  constructor(
    private readonly heap: Heap,
    readonly dtype: Dtype,
    readonly dims: readonly number[],
    private readonly pointer: number,
    private raw: number,
    handle?: number,
  ) {
    this.handle = handle ?? heap.wrap(dtype, dims, pointer);
  }

  get byteLength(): number {
    return sizeOf(this.dims) * itemBytes(this.dtype);
  }

  data(): TypedArray {
    const buffer = this.heap.module.HEAPU8.buffer; // another one after the memory has grown
    if (this.view?.buffer !== buffer) {
      this.view = new (arrayClass(this.dtype))(buffer, this.pointer, sizeOf(this.dims));
    }
    return this.view;
  }

  clear(): void {
    this.heap.module.HEAPU8.fill(0, this.pointer, this.pointer + this.byteLength);
  }

  rows(count: number): Tensor {
    return new WasmTensor(this.heap, this.dtype, withRows(this.dims, count), this.pointer, 0);
  }

  dispose(): void {
    if (this.handle) this.heap.module._OrtReleaseTensor(this.handle);
    if (this.raw) this.heap.module._free(this.raw);
    this.handle = this.raw = 0;
  }
}

export class WasmSession extends HandledSession<number> {
  constructor(
    protected readonly heap: Heap,
    handle: number,
    name: string,
  ) {
    super(handle, name);
  }

  bind(inputs: Inputs, outputs: Outputs): Binding {
    return new WasmBinding(this.heap, this, this.name, inputs, outputs);
  }

  protected release(handle: number): void {
    this.heap.module._OrtReleaseSession(handle);
  }
}

/** Names and handles in the heap: input names, inputs, output names, outputs. */
export class WasmBinding implements Binding {
  private place: number;
  protected readonly inputCount: number;
  protected readonly outputNames: string[];
  private readonly allocated: number[] = []; // numbers of the outputs that each run allocates

  constructor(
    protected readonly heap: Heap,
    protected readonly session: WasmSession,
    protected readonly name: string,
    inputs: Inputs,
    outputs: Outputs,
  ) {
    this.inputCount = inputs.size;
    this.outputNames = [...outputs.keys()];
    this.place = heap.allocate(2 * POINTER_BYTES * (inputs.size + outputs.size));
    try {
      this.write(inputs, outputs);
    } catch (error) {
      heap.module._free(this.place);
      throw error;
    }
  }

  private write(inputs: Inputs, outputs: Outputs): void {
    const { heap } = this;
    const { module } = heap;
    let i = 0;
    for (const [input, tensor] of inputs) {
      module.setValue(this.place + POINTER_BYTES * i, heap.name(input), "*");
      module.setValue(this.place + POINTER_BYTES * (inputs.size + i), (tensor as HandledTensor).handle, "*");
      i++;
    }
    i = 0;
    for (const [output, tensor] of outputs) {
      module.setValue(this.outputNamesPlace + POINTER_BYTES * i, heap.name(output), "*");
      const isAllocated = typeof tensor === "string";
      module.setValue(this.outputsPlace + POINTER_BYTES * i, isAllocated ? 0 : (tensor as HandledTensor).handle, "*");
      if (isAllocated) this.allocated.push(i);
      i++;
    }
  }

  private get outputNamesPlace(): number {
    return this.place + 2 * POINTER_BYTES * this.inputCount;
  }

  protected get outputsPlace(): number {
    return this.outputNamesPlace + POINTER_BYTES * this.outputNames.length;
  }

  run(): void | Promise<void> {
    const { module } = this.heap;
    this.releaseOutputs();
    const session = this.session.handle;
    try {
      const code = module._OrtRun(
        session,
        this.place,
        this.place + POINTER_BYTES * this.inputCount,
        this.inputCount,
        this.outputNamesPlace,
        this.outputNames.length,
        this.outputsPlace,
        0,
      );
      if (typeof code === "number") {
        this.check(code);
        return;
      }
      const fail = (error: unknown) => {
        throw this.heap.errorOf(error, this.name);
      };
      return code.then((late) => this.check(late), fail);
    } catch (error) {
      throw this.heap.errorOf(error, this.name);
    }
  }

  /** Release the outputs of the latest run that no call has taken, such as those of a run that failed later. */
  protected releaseOutputs(): void {
    for (const i of this.allocated) {
      const handle = this.takeOutput(i);
      if (handle) this.heap.module._OrtReleaseTensor(handle);
    }
  }

  /** Return the handle of an output, which is the caller's from then on; 0 if it was taken. */
  private takeOutput(i: number): number {
    const place = this.outputsPlace + POINTER_BYTES * i;
    const handle = this.heap.pointerAt(place);
    this.heap.module.setValue(place, 0, "*");
    return handle;
  }

  private check(code: number): void {
    if (code) throw translateError(new Error(this.heap.lastError()), this.name);
  }

  output(name: string): Tensor {
    const { module } = this.heap;
    const handle = this.takeOutput(this.outputNames.indexOf(name));
    const stack = module.stackSave();
    const place = module.stackAlloc(4 * POINTER_BYTES);
    try {
      const [type, data, dims, rank] = [0, 1, 2, 3].map((i) => place + POINTER_BYTES * i);
      if (module._OrtGetTensorData(handle, type, data, dims, rank)) throw new Error(this.heap.lastError());
      const sizes: number[] = [];
      const dimsPlace = this.heap.pointerAt(dims);
      for (let i = 0; i < module.getValue(rank, "i32"); i++) {
        sizes.push(module.getValue(dimsPlace + POINTER_BYTES * i, "i32"));
      }
      module._OrtFree(dimsPlace);
      const code = module.getValue(type, "i32");
      const dtype = (Object.keys(DATA_TYPES) as Dtype[]).find((known) => DATA_TYPES[known] === code);
      if (dtype === undefined) throw new Error(`the output ${name} has the type ${code}`);
      return this.tensorAt(dtype, sizes, this.heap.pointerAt(data), handle, name);
    } catch (error) {
      module._OrtReleaseTensor(handle);
      throw translateError(error, this.name);
    } finally {
      module.stackRestore(stack);
    }
  }

  /** Return the tensor of an allocated output. pointer: where its values are. */
  protected tensorAt(dtype: Dtype, dims: readonly number[], pointer: number, handle: number, _name: string): Tensor {
    return new WasmTensor(this.heap, dtype, dims, pointer, 0, handle);
  }

  dispose(): void {
    if (!this.place) return;
    this.releaseOutputs();
    this.heap.module._free(this.place);
    this.place = 0;
  }
}
