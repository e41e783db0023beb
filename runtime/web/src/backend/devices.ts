/** The devices of this runtime, and the choice among them. */

import { DeviceError, MissingExtraError, OutOfMemoryError } from "../base/errors.js";
import { shown } from "../base/validation.js";
import { manifestOf, readingFile, readMetadata } from "../format/modelFile.js";
import { largestWeight } from "../format/onnxGraph.js";
import type { Backend } from "./session.js";
import { wasmBackend, type WasmOptions } from "./wasmSession.js";
import type { GpuChoice } from "./webgpuSession.js";

export const DEVICES = ["auto", "node", "wasm", "webgpu"] as const;

/** Return whether this is Node, and no browser. */
export function isNode(): boolean {
  const process = (globalThis as { process?: { versions?: { node?: string }; type?: string } }).process;
  return typeof process?.versions?.node === "string" && process.type !== "renderer";
}

async function nodeBackend(threads: number | undefined): Promise<Backend> {
  return (await import("./nodeSession.js")).nodeBackend(threads); // no page needs its code
}

interface NamedBytes {
  readonly name: string;
  readonly bytes: Uint8Array;
}

/** The device for a file that is still to be read. */
export interface DeviceChoice {
  readonly mapsWeights: Backend["mapsWeights"];
  /** Open the file with a backend for it. Throw DeviceError if the device cannot run it, and the errors of `open`. */
  open<T>(file: NamedBytes, open: (backend: Backend) => Promise<T>): Promise<T>;
}

/**
 * Choose the device for a file.
 *
 * device: "auto" is "node" in Node if onnxruntime-node is installed. In browsers it is "webgpu" for a file that suits it,
 *     if the browser has a GPU and no address of a WebAssembly file is given, and else "wasm". So is it for a file that the
 *     GPU refuses, or has no memory for.
 * Throw DeviceError for a device that does not exist or is not available, MissingExtraError without onnxruntime-node.
 */
export async function chooseDevice(device: string, options: WasmOptions): Promise<DeviceChoice> {
  if (device === "webgpu") {
    if (isNode()) throw new DeviceError("device webgpu is for browsers: choose node or wasm");
    const gpu = await gpuOf(options);
    return { mapsWeights: "bytes", open: async (file, open) => open(await gpu.backendFor(needsOf(file))) };
  }
  if (device === "auto" && !isNode() && navigator.gpu && !options.wasmUrl && !options.wasmBinary) {
    const gpu = await gpuOf(options).catch(() => undefined);
    if (gpu && !gpu.isSoftware) {
      return { mapsWeights: "bytes", open: (file, open) => openOnGpuOrWasm(gpu, file, options, open) };
    }
  }
  const backend = await backendOf(device, options);
  return { mapsWeights: backend.mapsWeights, open: (_, open) => open(backend) };
}

async function gpuOf(options: WasmOptions): Promise<GpuChoice> {
  return (await import("./webgpuSession.js")).GpuChoice.find(options); // most pages need no code of it
}

/** Open a file on the GPU; in WebAssembly if the GPU refuses it or has no memory for it. */
export async function openOnGpuOrWasm<T>(
  gpu: Pick<GpuChoice, "backendFor">,
  file: NamedBytes,
  options: WasmOptions,
  open: (backend: Backend) => Promise<T>,
): Promise<T> {
  try {
    return await open(await gpu.backendFor(needsOf(file)));
  } catch (error) {
    if (!(error instanceof DeviceError || error instanceof OutOfMemoryError)) throw error;
    return open(await wasmBackend(options));
  }
}

/** Return the facts of a file on which it depends whether a GPU can run it. */
function needsOf({ name, bytes }: NamedBytes) {
  return readingFile(name, () => ({
    name,
    manifest: manifestOf(readMetadata(bytes)),
    largestWeight: largestWeight(bytes),
  }));
}

/**
 * Return the backend of a device that suits all files: "node", "wasm", or "auto", which is the first available of these.
 *
 * Throw DeviceError for a device that does not exist or is not available, MissingExtraError without onnxruntime-node.
 */
export async function backendOf(device: string, options: WasmOptions): Promise<Backend> {
  if (!(DEVICES as readonly string[]).includes(device)) {
    throw new DeviceError(`there is no device ${shown(device)}: choose one of ${DEVICES.join(", ")}`);
  }
  if (device === "node" && !isNode()) throw new DeviceError("device node is for Node alone: choose wasm");
  if (device === "node") return nodeBackend(options.threads);
  if (device === "auto" && isNode()) {
    try {
      return await nodeBackend(options.threads);
    } catch (error) {
      if (!(error instanceof MissingExtraError)) throw error;
      return wasmBackend(options); // onnxruntime-node is an optional package
    }
  }
  return wasmBackend(options);
}
