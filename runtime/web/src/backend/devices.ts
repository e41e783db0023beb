/** The devices of this runtime, and the choice among them. */

import { DeviceError } from "../base/errors.js";
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

/** The device for a file that is still to be read. */
export interface DeviceChoice {
  readonly mapsWeights: Backend["mapsWeights"];
  /** Return the backend for the file. Throw DeviceError for one that the device cannot run. */
  backendFor(file: { readonly name: string; readonly bytes: Uint8Array }): Promise<Backend>;
}

/**
 * Choose the device for a file.
 *
 * device: "auto" is "node" in Node if onnxruntime-node is installed. In browsers it is "webgpu" for a file that suits it,
 *     if the browser has a GPU and no address of a WebAssembly file is given, and else "wasm".
 * Throw DeviceError for a device that does not exist or is not available, MissingExtraError without onnxruntime-node.
 */
export async function chooseDevice(device: string, options: WasmOptions): Promise<DeviceChoice> {
  if (device === "webgpu") {
    if (isNode()) throw new DeviceError("device webgpu is for browsers: choose node or wasm");
    const gpu = await gpuOf(options);
    return { mapsWeights: "bytes", backendFor: async (file) => gpu.backendFor(needsOf(file)) };
  }
  if (device === "auto" && !isNode() && navigator.gpu && !options.wasmUrl && !options.wasmBinary) {
    const gpu = await gpuOf(options).catch(() => undefined);
    if (gpu && !gpu.isSoftware) return { mapsWeights: "bytes", backendFor: (file) => gpuOrWasm(gpu, file, options) };
  }
  const backend = await backendOf(device, options);
  return { mapsWeights: backend.mapsWeights, backendFor: async () => backend };
}

async function gpuOf(options: WasmOptions): Promise<GpuChoice> {
  return (await import("./webgpuSession.js")).GpuChoice.find(options); // most pages need no code of it
}

async function gpuOrWasm(
  gpu: GpuChoice,
  file: { readonly name: string; readonly bytes: Uint8Array },
  options: WasmOptions,
): Promise<Backend> {
  try {
    return await gpu.backendFor(needsOf(file));
  } catch (error) {
    if (!(error instanceof DeviceError)) throw error;
    return wasmBackend(options);
  }
}

/** Return the facts of a file on which it depends whether a GPU can run it. */
function needsOf({ name, bytes }: { readonly name: string; readonly bytes: Uint8Array }) {
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
    } catch {
      return wasmBackend(options); // onnxruntime-node is an optional package
    }
  }
  return wasmBackend(options);
}
