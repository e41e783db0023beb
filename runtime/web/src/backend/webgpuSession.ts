/**
 * Sessions on the GPU, by onnxruntime's WebAssembly module with WebGPU kernels.
 *
 * As in `wasmSession`, the module is called by itself. Caches and the context of an encoder are GPU buffers, past and
 * present are one buffer, and rows move by copies between buffers. The new tokens and the logits are in the module's heap:
 * a run uploads the one and downloads the other, and nothing else.
 *
 * The module suspends a run while the GPU computes, and has one suspended call at most. So all models take turns.
 */

import { itemBytes, sizeOf, type Dtype } from "../base/arrays.js";
import { DeviceError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import { checkSuits, Gpu, isSoftware, requestAdapter, type BufferCopy, type GpuNeeds } from "./gpuDevice.js";
import {
  closedError,
  withRows,
  type Binding,
  type Inputs,
  type Outputs,
  type PartsCopy,
  type Session,
  type Tensor,
  type Weights,
} from "./session.js";
import {
  checkThreads,
  LOCATION_CPU,
  loadHeap,
  POINTER_BYTES,
  WasmBackend,
  WasmBinding,
  WasmSession,
  WasmTensor,
  type HandledTensor,
  type Heap,
  type OrtModule,
  type WasmOptions,
} from "./wasmSession.js";

/** The functions of the module for WebGPU: onnxruntime-web/lib/wasm/wasm-types.ts. */
interface GpuModule extends OrtModule {
  /** Let the calls that may be suspended return promises. */
  asyncInit(): void;
  webgpuInit(setDefaultDevice: (device: GPUDevice) => void): void;
  webgpuRegisterDevice(device: GPUDevice): readonly [id: number, instance: number, device: number];
  webgpuOnCreateSession(session: number): void;
  webgpuOnReleaseSession(session: number): void;
  webgpuRegisterBuffer(buffer: GPUBuffer, session: number): number;
  webgpuUnregisterBuffer(buffer: GPUBuffer): void;
  webgpuGetBuffer(handle: number): GPUBuffer;
  _OrtAppendExecutionProvider(
    options: number,
    name: number,
    keys: number,
    values: number,
    count: number,
  ): number | Promise<number>;
  _OrtCreateBinding(session: number): number;
  _OrtBindInput(binding: number, name: number, tensor: number): number | Promise<number>;
  _OrtBindOutput(binding: number, name: number, tensor: number, location: number): number;
  _OrtReleaseBinding(binding: number): number;
  _OrtRunWithBinding(
    session: number,
    binding: number,
    outputCount: number,
    outputs: number,
    options: number,
  ): number | Promise<number>;
}

const LOCATION_GPU_BUFFER = 4; // of onnxruntime-web/lib/wasm/wasm-common.ts
const LOSS_NOTICE_MS = 50;

/** A module and its GPU. */
interface Runtime {
  readonly heap: Heap;
  readonly module: GpuModule;
  readonly gpu: Gpu;
  readonly turns: Turns;
  /** Handles of the open sessions. */
  readonly sessions: Set<number>;
}

let loading: Promise<Runtime> | undefined;

/** An adapter for files that are still to be read. */
export class GpuChoice {
  private constructor(
    private readonly adapter: GPUAdapter,
    private readonly options: WasmOptions,
  ) {}

  /** Return the adapter of the browser. Throw DeviceError if there is none. */
  static async find(options: WasmOptions): Promise<GpuChoice> {
    checkThreads(options.threads);
    const adapter = await requestAdapter();
    if (adapter) return new GpuChoice(adapter, options);
    const reason = (globalThis.navigator as Partial<Navigator> | undefined)?.gpu
      ? "this browser has no GPU for it"
      : "this browser has no WebGPU, or the page is not served over https";
    throw new DeviceError(`device webgpu is not available: ${reason}: choose device wasm`);
  }

  /** Whether it computes on the CPU. */
  get isSoftware(): boolean {
    return isSoftware(this.adapter);
  }

  /** Return the backend for a file. Throw DeviceError if this GPU cannot run it. */
  async backendFor(needs: GpuNeeds): Promise<WebGpuBackend> {
    checkSuits(this.adapter, needs);
    try {
      return new WebGpuBackend(await sharedRuntime(this.adapter, this.options));
    } catch (error) {
      if (error instanceof DeviceError) throw error;
      throw new DeviceError(
        `device webgpu is not available: ${String(error instanceof Error ? error.message : error)}`,
        undefined,
        error,
      );
    }
  }
}

/** Return the runtime of all models. After a failure, a trap, or the loss of its GPU the next model gets another one. */
function sharedRuntime(adapter: GPUAdapter, options: WasmOptions): Promise<Runtime> {
  if (loading) return loading;
  const forget = () => {
    if (loading === own) loading = undefined; // and not a runtime that was loaded since
  };
  const own = load(adapter, options, forget);
  own.catch(forget); // a later call may have a better address
  return (loading = own);
}

async function load(adapter: GPUAdapter, options: WasmOptions, forget: () => void): Promise<Runtime> {
  const script = () => import("onnxruntime-web/ort-wasm-simd-threaded.asyncify.mjs" as string);
  const threads = options.threads ?? 1; // few operators run on the CPU
  const opening = Gpu.of(adapter);
  try {
    const [gpu, heap] = await Promise.all([opening, loadHeap({ ...options, threads }, script)]);
    const module = heap.module as GpuModule;
    const turns = new Turns(gpu);
    heap.onTrap = () => {
      forget();
      turns.hasTrapped = true;
    };
    gpu.lost.catch(forget);
    module.asyncInit();
    module.webgpuInit(() => {});
    return { heap, module, gpu, turns, sessions: new Set() };
  } catch (error) {
    opening.then(
      (gpu) => gpu.destroy("its WebAssembly could not be loaded"),
      () => {},
    );
    throw error;
  }
}

/** The calls that the module may suspend, one after the other. */
class Turns {
  /** Whether the module is in no known state. */
  hasTrapped = false;
  private last: Promise<unknown> = Promise.resolve();
  private fail = (_: unknown) => {}; // ends the call whose turn it is

  constructor(private readonly gpu: Gpu) {
    gpu.lost.catch((error) => this.fail(error));
  }

  /** Run a call when all earlier ones have ended. Throw DeviceError if the GPU is lost meanwhile. */
  take<T>(call: () => Promise<T>): Promise<T> {
    const turn = this.last.then(async () => {
      if (this.gpu.isLost) return this.gpu.lost;
      try {
        return await new Promise<T>((resolve, reject) => {
          this.fail = reject;
          call().then(resolve, reject);
        });
      } catch (error) {
        // What fails because the GPU is lost may fail before the browser says so.
        await Promise.race([this.gpu.lost, new Promise((resolve) => setTimeout(resolve, LOSS_NOTICE_MS))]);
        if (this.hasTrapped) this.gpu.destroy("its WebAssembly has failed"); // which ends the calls that wait
        throw error;
      }
    });
    this.last = turn.catch(() => {});
    return turn;
  }
}

export class WebGpuBackend extends WasmBackend {
  override readonly device = "webgpu";

  constructor(private readonly runtime: Runtime) {
    super(runtime.heap);
  }

  override deviceTensor(dtype: Dtype, dims: readonly number[]): Tensor {
    const bytes = sizeOf(dims) * itemBytes(dtype);
    return new GpuTensor(this.runtime, dtype, dims, new SharedBuffer(this.runtime, this.runtime.gpu.buffer(bytes)));
  }

  override tensorLike(tensor: Tensor, dims: readonly number[]): Tensor {
    const { dtype } = tensor;
    return tensor instanceof GpuTensor ? this.deviceTensor(dtype, dims) : this.tensor(dtype, dims);
  }

  override copyParts(copies: readonly PartsCopy[]): void {
    const onGpu = copies.filter(({ from, size }) => from instanceof GpuTensor && size > 0);
    if (onGpu.length) this.runtime.gpu.copy(onGpu.map(bufferCopies));
    super.copyParts(copies.filter(({ from }) => !(from instanceof GpuTensor)));
  }

  override async open(model: Uint8Array, weights: Weights, manifest: Manifest, name: string): Promise<Session> {
    const { runtime } = this;
    const { module, gpu, turns, sessions } = runtime;
    const handle = await turns.take(async () => {
      let session = 0;
      try {
        session = await this.openHandle(model, weights, manifest, name, (options) => this.addProvider(options));
        return session;
      } finally {
        module.webgpuOnCreateSession(session); // 0 if the module could not open it
      }
    });
    sessions.add(handle);
    const session = new WebGpuSession(runtime, handle, name);
    try {
      gpu.check();
    } catch (error) {
      session.dispose();
      throw error;
    }
    return session;
  }

  private async addProvider(options: number): Promise<void> {
    const { heap } = this;
    const { module, gpu } = this.runtime;
    const [id, instance, device] = module.webgpuRegisterDevice(gpu.device);
    const settings = Object.entries({ deviceId: id, webgpuInstance: instance, webgpuDevice: device });
    const place = heap.allocate(2 * POINTER_BYTES * settings.length);
    try {
      settings.forEach(([key, value], i) => {
        module.setValue(place + POINTER_BYTES * i, heap.name(key), "*");
        module.setValue(place + POINTER_BYTES * (settings.length + i), heap.name(String(value)), "*");
      });
      const values = place + POINTER_BYTES * settings.length;
      heap.check(
        await module._OrtAppendExecutionProvider(options, heap.name("WebGPU"), place, values, settings.length),
      );
    } finally {
      module._free(place);
    }
  }
}

/** Return the copies of bytes that a copy of parts is: one, if the parts follow each other. */
function bufferCopies({ from, fromStart, fromStride, to, toStart, toStride, size, parts }: PartsCopy): BufferCopy[] {
  const item = itemBytes(from.dtype);
  const buffers = { from: (from as GpuTensor).shared.buffer, to: (to as GpuTensor).shared.buffer };
  const isOne = parts === 1 || (fromStride === size && toStride === size);
  return Array.from({ length: isOne ? 1 : parts }, (_, part) => ({
    ...buffers,
    fromOffset: (fromStart + part * fromStride) * item,
    toOffset: (toStart + part * toStride) * item,
    size: (isOne ? size * parts : size) * item,
  }));
}

/** A buffer of tensors that share it, and its handle in the module. */
class SharedBuffer {
  private handle = 0;
  private users = 0;

  constructor(
    private readonly runtime: Runtime,
    readonly buffer: GPUBuffer,
  ) {}

  /** Return the handle, for a tensor that will `leave`. */
  join(): number {
    const { module, sessions } = this.runtime;
    const [session] = sessions;
    if (session === undefined) throw closedError();
    if (!this.users++) this.handle = module.webgpuRegisterBuffer(this.buffer, session);
    return this.handle;
  }

  leave(): void {
    if (!--this.users) this.runtime.module.webgpuUnregisterBuffer(this.buffer);
  }
}

class GpuTensor implements HandledTensor {
  private own = 0;

  /** isView: whether another tensor frees the buffer. */
  constructor(
    private readonly runtime: Runtime,
    readonly dtype: Dtype,
    readonly dims: readonly number[],
    readonly shared: SharedBuffer,
    private readonly isView = false,
  ) {}

  get byteLength(): number {
    return sizeOf(this.dims) * itemBytes(this.dtype);
  }

  /** The handle of the module's tensor, which is made when the first binding needs it. */
  get handle(): number {
    if (this.own) return this.own;
    const buffer = this.shared.join();
    try {
      return (this.own = this.runtime.heap.wrap(this.dtype, this.dims, buffer, LOCATION_GPU_BUFFER));
    } catch (error) {
      this.shared.leave();
      throw error;
    }
  }

  data(): never {
    throw new DeviceError("the values of a tensor on the GPU are not in JavaScript's memory");
  }

  clear(): void {
    this.runtime.gpu.clear(this.shared.buffer);
  }

  rows(count: number): Tensor {
    return new GpuTensor(this.runtime, this.dtype, withRows(this.dims, count), this.shared, true);
  }

  dispose(): void {
    if (this.own) {
      this.runtime.module._OrtReleaseTensor(this.own);
      this.shared.leave();
    }
    this.own = 0;
    if (!this.isView) this.shared.buffer.destroy();
  }
}

class WebGpuSession extends WasmSession {
  constructor(
    private readonly runtime: Runtime,
    handle: number,
    name: string,
  ) {
    super(runtime.heap, handle, name);
  }

  override bind(inputs: Inputs, outputs: Outputs): Binding {
    return new WebGpuBinding(this.runtime, this, this.name, inputs, outputs);
  }

  protected override release(handle: number): void {
    const { module, turns, sessions } = this.runtime;
    sessions.delete(handle);
    const release = async () => {
      module._OrtReleaseSession(handle);
      module.webgpuOnReleaseSession(handle);
    };
    turns.take(release).catch(() => {}); // with a lost GPU the module is left alone
  }
}

/** A binding whose tensors may be on the GPU. */
class WebGpuBinding extends WasmBinding {
  private readonly places: readonly (Tensor | "host" | "device")[];
  private readonly allocatesOnDevice: boolean;

  constructor(
    private readonly runtime: Runtime,
    session: WasmSession,
    name: string,
    private readonly inputs: Inputs,
    private readonly outputs: Outputs,
  ) {
    super(runtime.heap, session, name, inputs, outputs);
    this.places = [...outputs.values()];
    this.allocatesOnDevice = this.places.includes("device");
  }

  override async run(): Promise<void> {
    const { turns, gpu } = this.runtime;
    await turns.take(async () => {
      if (this.allocatesOnDevice) await this.runWithBinding();
      else await super.run();
    });
    gpu.check();
  }

  /** Run with outputs that stay on the GPU, which only an IoBinding of onnxruntime allows. It is made again for each run. */
  private async runWithBinding(): Promise<void> {
    const { heap, runtime, session } = this;
    const { module } = runtime;
    const { handle } = session;
    this.releaseOutputs();
    const binding = module._OrtCreateBinding(handle);
    try {
      if (!binding) throw new Error(heap.lastError());
      for (const [input, tensor] of this.inputs) {
        heap.check(await module._OrtBindInput(binding, heap.name(input), (tensor as HandledTensor).handle));
      }
      for (const [i, output] of this.outputNames.entries()) {
        const place = this.places[i];
        const tensor = typeof place === "string" ? 0 : (place as HandledTensor).handle;
        const location = place === "device" ? LOCATION_GPU_BUFFER : LOCATION_CPU;
        heap.check(module._OrtBindOutput(binding, heap.name(output), tensor, tensor ? 0 : location));
      }
      heap.check(await module._OrtRunWithBinding(handle, binding, this.outputNames.length, this.outputsPlace, 0));
      for (const [i, place] of this.places.entries()) {
        if (typeof place === "string") continue;
        const returned = heap.pointerAt(this.outputsPlace + POINTER_BYTES * i);
        if (returned !== (place as HandledTensor).handle) module._OrtReleaseTensor(returned); // another one of its memory
      }
    } catch (error) {
      throw heap.errorOf(error, this.name);
    } finally {
      if (binding) module._OrtReleaseBinding(binding);
    }
  }

  protected override tensorAt(
    dtype: Dtype,
    dims: readonly number[],
    pointer: number,
    handle: number,
    name: string,
  ): Tensor {
    if (this.outputs.get(name) !== "device" || !sizeOf(dims)) {
      return new WasmTensor(this.heap, dtype, dims, pointer, 0, handle);
    }
    // The module's buffer may be larger, and must not outlive the session.
    const { module, gpu } = this.runtime;
    const from = module.webgpuGetBuffer(pointer);
    const to = gpu.buffer(sizeOf(dims) * itemBytes(dtype));
    try {
      gpu.copy([[{ from, fromOffset: 0, to, toOffset: 0, size: to.size }]]);
    } catch (error) {
      to.destroy();
      throw error;
    }
    module._OrtReleaseTensor(handle);
    return new GpuTensor(this.runtime, dtype, dims, new SharedBuffer(this.runtime, to));
  }
}
