/**
 * onnxruntime's WebAssembly module in memory, for tests of what the runtime gives it and takes from it.
 *
 * It computes nothing: a run checks that all that it reads and writes still exists, when it begins and when it ends, and
 * makes the outputs for which no tensor was given. A run may be held, as a run that waits for the GPU. Freed memory is not
 * used again, so that every later use of it is a fault.
 */

import type { OrtModule } from "../../src/backend/wasmSession.js";
import type { FakeGpuBuffer, FakeGpuDevice } from "./fakeGpu.js";

const HEAP_BYTES = 1 << 26;
const STACK_BYTES = 1 << 16;
const CPU = 1;

interface FakeTensor {
  readonly type: number;
  readonly data: number;
  readonly dims: readonly number[];
  readonly location: number;
}

interface Bound {
  readonly inputs: number[];
  readonly outputs: { readonly name: string; readonly tensor: number; readonly location: number }[];
}

/** A run that waits. */
export interface HeldRun {
  finish(): void;
  trap(): void;
}

export class FakeOrt implements OrtModule {
  readonly HEAPU8 = new Uint8Array(HEAP_BYTES);
  readonly blocks = new Map<number, number>(); // pointer → bytes, without the freed ones
  readonly tensors = new Map<number, FakeTensor>();
  readonly sessions = new Set<number>();
  /** Uses of what does not exist any more. */
  readonly faults: string[] = [];
  /** Runs that wait; undefined: no run waits. */
  held: HeldRun[] | undefined;
  /** The outputs that a run makes: type of ONNX and dimensions. */
  outputOf = (_: string): { readonly type: number; readonly dims: readonly number[] } => ({ type: 1, dims: [1] });
  /** The calls for memory and tensors that succeed before one fails. */
  room = Infinity;
  /** The data of this output cannot be read. */
  unreadable: string | undefined;
  private readonly nameOf = new Map<number, string>(); // of tensors that a run has made
  private readonly bindings = new Map<number, Bound>();
  private readonly buffers = new Map<number, GPUBuffer>();
  private readonly view = new DataView(this.HEAPU8.buffer);
  private top = STACK_BYTES;
  private stack = 8;
  private count = 0;

  constructor(private readonly device?: FakeGpuDevice) {}

  /** Finish all runs that wait. Later ones do not wait. */
  resume(): void {
    const held = this.held ?? [];
    this.held = undefined;
    for (const { finish } of held) finish();
  }

  private fault(text: string): never {
    this.faults.push(text);
    throw new Error(text);
  }

  private place(pointer: number): number {
    if (pointer < STACK_BYTES) return pointer;
    for (const [begin, bytes] of this.blocks) if (pointer >= begin && pointer < begin + bytes) return pointer;
    return this.fault(`${pointer} is not a memory`);
  }

  // Memory and texts.
  _malloc(size: number): number {
    return this.room-- > 0 ? this.block(size) : 0;
  }
  private block(size: number): number {
    const pointer = this.top;
    this.top += Math.ceil((size + 1) / 8) * 8;
    if (this.top > HEAP_BYTES) return 0;
    this.blocks.set(pointer, size);
    return pointer;
  }
  _free(pointer: number): void {
    if (!this.blocks.delete(pointer)) this.fault(`${pointer} is freed and was not allocated`);
  }
  stackSave = () => this.stack;
  stackRestore(stack: number): void {
    this.stack = stack;
  }
  stackAlloc(size: number): number {
    const place = this.stack;
    this.stack += Math.ceil(size / 8) * 8;
    return place;
  }
  getValue = (pointer: number, _: string) => this.view.getInt32(this.place(pointer), true);
  setValue = (pointer: number, value: number, _: string) => this.view.setInt32(this.place(pointer), value, true);
  UTF8ToString(pointer: number): string {
    const end = this.HEAPU8.indexOf(0, this.place(pointer));
    return Buffer.from(this.HEAPU8.subarray(pointer, end)).toString();
  }
  lengthBytesUTF8 = (text: string) => Buffer.byteLength(text);
  stringToUTF8(text: string, pointer: number, _: number): void {
    this.HEAPU8.set(Buffer.from(`${text}\0`), this.place(pointer));
  }
  mountExternalData(): void {}
  unmountExternalData(): void {}

  // Sessions.
  _OrtInit = () => 0;
  _OrtGetLastError(_: number, message: number): number {
    this.setValue(message, 0, "*");
    return 0;
  }
  _OrtCreateSessionOptions = () => 1;
  _OrtAddSessionConfigEntry = () => 0;
  _OrtReleaseSessionOptions = () => 0;
  _OrtAppendExecutionProvider = () => 0;
  _OrtCreateSession(): number {
    this.sessions.add(++this.count);
    return this.count;
  }
  _OrtReleaseSession(session: number): number {
    if (!this.sessions.delete(session)) this.fault(`the session ${session} is released and was none`);
    return 0;
  }

  // Tensors.
  _OrtCreateTensor(type: number, data: number, _: number, dims: number, rank: number, location: number): number {
    if (this.room-- <= 0) return 0;
    const sizes = Array.from({ length: rank }, (_, i) => this.getValue(dims + 4 * i, "i32"));
    this.tensors.set(++this.count, { type, data, dims: sizes, location });
    return this.count;
  }
  _OrtGetTensorData(tensor: number, type: number, data: number, dims: number, rank: number): number {
    const one = this.tensors.get(tensor) ?? this.fault(`the tensor ${tensor} is read and does not exist`);
    if (this.unreadable !== undefined && this.nameOf.get(tensor) === this.unreadable) return 1;
    const sizes = this.block(4 * one.dims.length);
    one.dims.forEach((size, i) => this.setValue(sizes + 4 * i, size, "i32"));
    this.setValue(type, one.type, "i32");
    this.setValue(data, one.data, "*");
    this.setValue(dims, sizes, "*");
    this.setValue(rank, one.dims.length, "i32");
    return 0;
  }
  _OrtReleaseTensor(tensor: number): number {
    const one = this.tensors.get(tensor) ?? this.fault(`the tensor ${tensor} is released and does not exist`);
    this.tensors.delete(tensor);
    if (this.nameOf.delete(tensor)) this.freeData(one);
    return 0;
  }
  _OrtFree(pointer: number): number {
    this._free(pointer);
    return 0;
  }

  /** Make the output of a run. */
  private made(name: string, location: number): number {
    const { type, dims } = this.outputOf(name);
    const bytes = 8 * dims.reduce((product, size) => product * size, 1);
    let data = 0;
    if (location === CPU) data = this.block(bytes);
    else this.buffers.set((data = ++this.count), this.device!.createBuffer({ size: bytes }) as FakeGpuBuffer);
    this.tensors.set(++this.count, { type, data, dims, location });
    this.nameOf.set(this.count, name);
    return this.count;
  }
  private freeData({ data, location }: FakeTensor): void {
    if (location === CPU) this._free(data);
    else {
      this.buffers.get(data)?.destroy();
      this.buffers.delete(data);
    }
  }

  // Runs.
  private check(session: number, tensors: readonly number[]): void {
    if (!this.sessions.has(session)) this.fault(`a run of the session ${session}, which does not exist`);
    for (const tensor of tensors) {
      const one = this.tensors.get(tensor) ?? this.fault(`a run uses the tensor ${tensor}, which does not exist`);
      if (one.location === CPU) this.place(one.data);
      else if (!this.buffers.has(one.data)) this.fault(`a run uses the buffer ${one.data}, which does not exist`);
    }
  }
  private run(session: number, tensors: readonly number[], end: () => void): Promise<number> {
    this.check(session, tensors);
    return new Promise((resolve, reject) => {
      const finish = () => {
        try {
          this.check(session, tensors);
          end();
          resolve(0);
        } catch (error) {
          reject(error);
        }
      };
      const trap = () => reject(new WebAssembly.RuntimeError("unreachable"));
      if (this.held) this.held.push({ finish, trap });
      else finish();
    });
  }
  _OrtRun(
    session: number,
    _names: number,
    inputs: number,
    inputCount: number,
    outputNames: number,
    outputCount: number,
    outputs: number,
    _options: number,
  ): Promise<number> {
    const handles = (begin: number, count: number) =>
      Array.from({ length: count }, (_, i) => this.getValue(begin + 4 * i, "*"));
    const given = handles(outputs, outputCount).filter((handle) => handle);
    return this.run(session, [...handles(inputs, inputCount), ...given], () => {
      handles(outputs, outputCount).forEach((handle, i) => {
        const name = this.UTF8ToString(this.getValue(outputNames + 4 * i, "*"));
        if (!handle) this.setValue(outputs + 4 * i, this.made(name, CPU), "*");
      });
    });
  }
  _OrtCreateBinding(): number {
    this.bindings.set(++this.count, { inputs: [], outputs: [] });
    return this.count;
  }
  _OrtBindInput(binding: number, _: number, tensor: number): number {
    this.bindings.get(binding)!.inputs.push(tensor);
    return 0;
  }
  _OrtBindOutput(binding: number, name: number, tensor: number, location: number): number {
    this.bindings.get(binding)!.outputs.push({ name: this.UTF8ToString(name), tensor, location });
    return 0;
  }
  _OrtReleaseBinding(binding: number): number {
    if (!this.bindings.delete(binding)) this.fault(`the binding ${binding} does not exist`);
    return 0;
  }
  _OrtRunWithBinding(session: number, binding: number, _count: number, outputs: number): Promise<number> {
    const bound = this.bindings.get(binding)!;
    const given = bound.outputs.map(({ tensor }) => tensor).filter((tensor) => tensor);
    return this.run(session, [...bound.inputs, ...given], () => {
      bound.outputs.forEach(({ name, tensor, location }, i) => {
        this.setValue(outputs + 4 * i, tensor || this.made(name, location), "*");
      });
    });
  }

  // The GPU.
  asyncInit(): void {}
  webgpuInit(): void {}
  webgpuRegisterDevice = () => [1, 2, 3] as const;
  webgpuOnCreateSession(): void {}
  webgpuOnReleaseSession(): void {}
  webgpuRegisterBuffer(buffer: GPUBuffer): number {
    this.buffers.set(++this.count, buffer);
    return this.count;
  }
  webgpuUnregisterBuffer(buffer: GPUBuffer): void {
    for (const [handle, one] of this.buffers) if (one === buffer) this.buffers.delete(handle);
  }
  webgpuGetBuffer = (handle: number) => this.buffers.get(handle) ?? this.fault(`the buffer ${handle} does not exist`);
}
