/** The devices of this runtime, and the choice among them. */

import { DeviceError } from "../base/errors.js";
import { shown } from "../base/validation.js";
import type { Backend } from "./session.js";
import { wasmBackend, type WasmOptions } from "./wasmSession.js";

export const DEVICES = ["auto", "node", "wasm", "webgpu"] as const;

/** Return whether this is Node, and no browser. */
export function isNode(): boolean {
  const process = (globalThis as { process?: { versions?: { node?: string }; type?: string } }).process;
  return typeof process?.versions?.node === "string" && process.type !== "renderer";
}

async function nodeBackend(threads: number | undefined): Promise<Backend> {
  return (await import("./nodeSession.js")).nodeBackend(threads); // no page needs its code
}

/**
 * Return the backend of a device.
 *
 * device: "auto" is "node" in Node if onnxruntime-node is installed, and "wasm" elsewhere.
 * Throw DeviceError for a device that does not exist or is not available, MissingExtraError without onnxruntime-node.
 */
export async function backendOf(device: string, options: WasmOptions): Promise<Backend> {
  if (!(DEVICES as readonly string[]).includes(device)) {
    throw new DeviceError(`there is no device ${shown(device)}: choose one of ${DEVICES.join(", ")}`);
  }
  if (device === "webgpu") {
    throw new DeviceError("device webgpu is not part of this build: choose wasm");
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
