/** The bytes of a model file, from wherever the caller has it. */

import { AbortedError, checkAborted, errorSummary, InputError, ModelFileError } from "../base/errors.js";
import { isNode } from "../backend/devices.js";
import type { ModelSource } from "../engine/engine.js";

/** The name of a file (in Node), an address, or the bytes of a file. */
export type ModelAddress = string | URL | Uint8Array | ArrayBuffer | Blob;

/** How far a download is. total: 0 if the server does not tell. */
export interface Progress {
  readonly loaded: number;
  readonly total: number;
}

export interface SourceOptions {
  readonly signal?: AbortSignal;
  readonly onProgress?: (progress: Progress) => void;
}

/** Read a model file. Throw ModelFileError if it cannot be read, AbortedError if the signal is aborted. */
export async function readSource(address: ModelAddress, options: SourceOptions): Promise<ModelSource> {
  checkAborted(options.signal);
  if (address instanceof Uint8Array) return { name: "the file", bytes: address };
  if (address instanceof ArrayBuffer) return { name: "the file", bytes: new Uint8Array(address) };
  if (typeof Blob !== "undefined" && address instanceof Blob) {
    return { name: (address as File).name ?? "the file", bytes: new Uint8Array(await address.arrayBuffer()) };
  }
  if (typeof address !== "string" && !(address instanceof URL)) {
    throw new InputError("a model is loaded from an address, the name of a file, its bytes, or a File");
  }
  const text = String(address);
  if (isNode() && (text.startsWith("file:") || !/^(https?|data|blob):/.test(text))) return readFromDisk(address);
  return { name: text, bytes: await download(text, options) };
}

async function readFromDisk(address: string | URL): Promise<ModelSource> {
  const [{ readFile, realpath }, { dirname, basename }, { fileURLToPath }] = await Promise.all([
    import("node:fs/promises"),
    import("node:path"),
    import("node:url"),
  ]);
  const name = String(address).startsWith("file:") ? fileURLToPath(address) : String(address);
  try {
    const path = await realpath(name); // onnxruntime follows no link out of the folder
    const bytes = await readFile(path);
    return { name, bytes, path: { folder: dirname(path), file: basename(path) } };
  } catch (error) {
    const code = (error as { code?: string }).code;
    if (code === "ENOENT") throw new ModelFileError(`${name} does not exist`, undefined, error);
    if (code === "EISDIR") throw new ModelFileError(`${name} is a folder, not a model file`, undefined, error);
    throw new ModelFileError(`${name} cannot be read: ${errorSummary(error)}`, undefined, error);
  }
}

async function download(address: string, { signal, onProgress }: SourceOptions): Promise<Uint8Array> {
  try {
    const response = await fetch(address, { signal: signal ?? null });
    if (!response.ok) throw new ModelFileError(`${address} cannot be loaded: the server answers ${response.status}`);
    // A compressed answer has another length than its content.
    const encoded = response.headers.get("content-encoding") !== null;
    const total = encoded ? 0 : Number(response.headers.get("content-length") ?? 0);
    const parts: Uint8Array[] = [];
    let loaded = 0;
    const reader = response.body!.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      loaded += value.length;
      onProgress?.({ loaded, total });
    }
    const bytes = new Uint8Array(loaded);
    let place = 0;
    for (const part of parts) {
      bytes.set(part, place);
      place += part.length;
    }
    return bytes;
  } catch (error) {
    if (error instanceof ModelFileError) throw error;
    if (signal?.aborted) throw new AbortedError("the call was aborted by its signal", undefined, error);
    throw new ModelFileError(`${address} cannot be loaded: ${errorSummary(error)}`, undefined, error);
  }
}
