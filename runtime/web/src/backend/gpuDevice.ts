/** The GPU: its adapter, its limits, and the device that sessions compute on. */

import { itemBytes, sizeOf } from "../base/arrays.js";
import { DeviceError, OutOfMemoryError, type TformerError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";

/**
 * The limits and features of an adapter that kernels of onnxruntime may use: all that it offers of them.
 *
 * The feature "subgroups" is left out: with it attention over 33 and more new positions is wrong on an adapter whose
 * subgroups have 4 lanes (docs/design/runtime.md#attention-on-webgpu). Without it the kernels share memory instead.
 */
const LIMITS = [
  "maxBindGroups",
  "maxBufferSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
  "maxComputeWorkgroupSizeY",
  "maxComputeWorkgroupSizeZ",
  "maxComputeWorkgroupStorageSize",
  "maxComputeWorkgroupsPerDimension",
  "maxStorageBufferBindingSize",
  "maxStorageBuffersPerShaderStage",
] as const;
const FEATURES = ["shader-f16"] as const;
const HALF = "shader-f16";

const COPY_ALIGNMENT_BYTES = 4; // of copies between buffers
const BUFFER_USAGE = 0x80 | 0x04 | 0x08; // GPUBufferUsage.STORAGE, COPY_SRC and COPY_DST

/** The facts of a model file on which it depends whether a GPU can run it. */
export interface GpuNeeds {
  readonly name: string;
  readonly manifest: Manifest;
  /** The bytes of its largest weight. */
  readonly largestWeight: number;
}

/** Return an adapter; undefined if the browser has none. */
export async function requestAdapter(): Promise<GPUAdapter | undefined> {
  try {
    return (await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" })) ?? undefined;
  } catch {
    return undefined;
  }
}

/** Return whether an adapter computes on the CPU, which WebAssembly does faster. */
export function isSoftware(adapter: GPUAdapter): boolean {
  const { info } = adapter;
  const older = (adapter as { isFallbackAdapter?: boolean }).isFallbackAdapter;
  return (info?.isFallbackAdapter ?? older ?? false) || /swiftshader|llvmpipe/i.test(`${info?.architecture}`);
}

/** Throw DeviceError for a file that has no kernels on WebGPU, or that exceeds the limits of an adapter. */
export function checkSuits(adapter: GPUAdapter, { name, manifest, largestWeight }: GpuNeeds): void {
  if (!manifest.devices.includes("webgpu")) {
    throw new DeviceError(
      `${name} has operators without WebGPU kernels (it suits ${manifest.devices.join(", ") || "no known device"}): ` +
        "export the model with --target web, or choose device wasm",
    );
  }
  if (manifest.precision === "fp16" && !adapter.features.has(HALF)) {
    throw new DeviceError(
      `${name} computes in half precision, which this GPU does not (it has no ${HALF}): export the model in fp32`,
    );
  }
  const limit = maxTensorBytes(adapter.limits);
  if (largestWeight > limit) {
    throw new DeviceError(
      `${name} has a weight of ${count(largestWeight)} bytes, and this GPU's buffers have at most ${count(limit)}: ` +
        "choose device wasm, or export a smaller or quantised model",
    );
  }
  for (const { past, dtype, shape } of manifest.decode?.caches ?? []) {
    const inner = shape.slice(shape.findLastIndex((size) => typeof size === "string") + 1).map(Number);
    const bytes = sizeOf(inner) * itemBytes(dtype);
    if (bytes % COPY_ALIGNMENT_BYTES) {
      throw new DeviceError(
        `${name} cannot run on webgpu: a token of its cache ${past} has ${bytes} bytes, no multiple of ` +
          `${COPY_ALIGNMENT_BYTES}, so that buffers cannot be copied in parts: choose device wasm`,
      );
    }
  }
}

function maxTensorBytes(limits: GPUSupportedLimits): number {
  return Math.min(limits.maxBufferSize, limits.maxStorageBufferBindingSize);
}

function count(number: number): string {
  return number.toLocaleString("en-US");
}

/** A copy of bytes from one buffer to another, or within one. Offsets and sizes are multiples of 4. */
export interface BufferCopy {
  readonly from: GPUBuffer;
  readonly fromOffset: number;
  readonly to: GPUBuffer;
  readonly toOffset: number;
  readonly size: number;
}

/** A device, its buffers and its errors. */
export class Gpu {
  /** Rejects with DeviceError when the device is lost. */
  readonly lost: Promise<never>;
  isLost = false;
  private error: TformerError | undefined; // the first that no call has thrown
  private reason: string | undefined; // why it was destroyed

  constructor(readonly device: GPUDevice) {
    this.lost = device.lost.then(({ message }) => {
      this.isLost = true;
      const reason = this.reason ?? (message || "the browser gives no reason");
      throw new DeviceError(`the GPU was lost (${reason}): load the model again`);
    });
    this.lost.catch(() => {}); // a run throws it
    device.addEventListener("uncapturederror", (event) => {
      event.preventDefault();
      this.error ??= errorOf(event.error);
    });
  }

  /** Return the device of an adapter. Throw DeviceError. */
  static async of(adapter: GPUAdapter): Promise<Gpu> {
    try {
      const requiredLimits = Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]]));
      const requiredFeatures = FEATURES.filter((name) => adapter.features.has(name));
      return new Gpu(await adapter.requestDevice({ requiredLimits, requiredFeatures }));
    } catch (error) {
      throw new DeviceError(`device webgpu is not available: ${String(error)}`, undefined, error);
    }
  }

  /** Free the device and its buffers. Later calls fail as those of a lost device do. */
  destroy(reason: string): void {
    this.reason ??= reason;
    this.isLost = true;
    this.device.destroy();
  }

  /** Return a buffer of zeros. Throw OutOfMemoryError if the GPU cannot bind it. */
  buffer(bytes: number): GPUBuffer {
    const limit = maxTensorBytes(this.device.limits);
    if (bytes > limit) {
      throw new OutOfMemoryError(
        `${count(bytes)} bytes are needed at once, and this GPU's buffers have at most ${count(limit)}: ask for fewer ` +
          "beams or sequences, or for fewer tokens",
      );
    }
    return this.device.createBuffer({ size: Math.max(4, Math.ceil(bytes / 4) * 4), usage: BUFFER_USAGE });
  }

  clear(buffer: GPUBuffer): void {
    const encoder = this.device.createCommandEncoder();
    encoder.clearBuffer(buffer);
    this.device.queue.submit([encoder.finish()]);
  }

  /** Copy bytes, one copy after the other, each as a list of parts. */
  copy(copies: readonly (readonly BufferCopy[])[]): void {
    // WebGPU copies nothing within one buffer: parts go by another one.
    const isWithin = (parts: readonly BufferCopy[]) => parts.length > 0 && parts[0].from === parts[0].to;
    const bytes = copies.map((parts) => (isWithin(parts) ? parts.reduce((sum, { size }) => sum + size, 0) : 0));
    const scratchBytes = bytes.reduce((most, one) => Math.max(most, one), 0);
    const scratch = scratchBytes ? this.buffer(scratchBytes) : undefined;
    try {
      this.submitCopies(copies, isWithin, scratch);
    } finally {
      scratch?.destroy(); // the commands that were submitted still use it
    }
  }

  private submitCopies(
    copies: readonly (readonly BufferCopy[])[],
    isWithin: (parts: readonly BufferCopy[]) => boolean,
    scratch: GPUBuffer | undefined,
  ): void {
    const encoder = this.device.createCommandEncoder();
    for (const parts of copies) {
      if (!isWithin(parts)) {
        for (const { from, fromOffset, to, toOffset, size } of parts) {
          encoder.copyBufferToBuffer(from, fromOffset, to, toOffset, size);
        }
        continue;
      }
      let place = 0;
      for (const { from, fromOffset, size } of parts) {
        encoder.copyBufferToBuffer(from, fromOffset, scratch!, place, size);
        place += size;
      }
      place = 0;
      for (const { to, toOffset, size } of parts) {
        encoder.copyBufferToBuffer(scratch!, place, to, toOffset, size);
        place += size;
      }
    }
    this.device.queue.submit([encoder.finish()]);
  }

  /** Throw the error of the GPU since the latest call, which no call of onnxruntime reports. */
  check(): void {
    const { error } = this;
    this.error = undefined;
    if (error) throw error;
  }
}

function errorOf(error: GPUError): TformerError {
  if (typeof GPUOutOfMemoryError === "function" && error instanceof GPUOutOfMemoryError) {
    return new OutOfMemoryError(
      "the GPU's memory is full: ask for fewer beams or sequences, or for fewer tokens, or dispose other models",
    );
  }
  return new DeviceError(`the GPU refused a computation: ${error.message.split("\n")[0].slice(0, 300)}`);
}
