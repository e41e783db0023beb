/** The bytes of a model file, from a file, an address or memory, and of the file next to it with its weights. */

import { checkAborted, errorSummary, InputError, ModelFileError, UnsupportedCallError } from "../base/errors.js";
import { isNode } from "../backend/devices.js";
import type { Backend } from "../backend/session.js";
import type { ModelSource } from "../engine/engine.js";
import { checkDigest, checkWeights, weightsFileOf, type WeightsFile } from "../format/digest.js";
import { readingFile, readMetadata } from "../format/modelFile.js";
import { download, type DownloadOptions, type Progress } from "./download.js";
import type { ModelStore } from "./store.js";

/** The name of a file (in Node), an address, or the bytes of a file. */
export type ModelAddress = string | URL | Uint8Array | ArrayBuffer | Blob;

export interface SourceOptions {
  readonly signal?: AbortSignal;
  readonly onProgress?: (progress: Progress) => void;
  /** Where downloads are kept. */
  readonly store?: ModelStore;
  /** Refuse more bytes than this. */
  readonly maxBytes?: number;
  /** Compare files with their digests. */
  readonly verify?: boolean;
  /** See `Backend`; "bytes" by default. */
  readonly mapsWeights?: Backend["mapsWeights"];
}

const READ_BYTES = 1 << 28; // of one read from the disk, which is limited to 2 GB

/** Read a model file. Throw ModelFileError if it cannot be read, AbortedError if the signal is aborted. */
export async function readSource(address: ModelAddress, options: SourceOptions): Promise<ModelSource> {
  checkAborted(options.signal);
  if (address instanceof Uint8Array) return ofBytes("the file", address, options);
  if (address instanceof ArrayBuffer) return ofBytes("the file", new Uint8Array(address), options);
  if (typeof Blob !== "undefined" && address instanceof Blob) {
    const name = (address as File).name ?? "the file";
    mustFit(name, address.size, options);
    return ofBytes(name, new Uint8Array(await address.arrayBuffer()), options);
  }
  if (typeof address !== "string" && !(address instanceof URL)) {
    throw new InputError("a model is loaded from an address, the name of a file, its bytes, or a File");
  }
  const text = String(address);
  if (isNode() && (text.startsWith("file:") || !/^(https?|data|blob):/.test(text))) return fromDisk(address, options);
  return fromServer(absoluteAddress(text), options);
}

/** Return the whole address of a file next to the page: stores are shared by all pages of a site. */
export function absoluteAddress(address: string): string {
  const { document, location } = globalThis as { document?: Document; location?: Location };
  const base = document?.baseURI ?? location?.href;
  return base === undefined ? address : new URL(address, base).href;
}

async function ofBytes(name: string, bytes: Uint8Array, options: SourceOptions): Promise<ModelSource> {
  mustFit(name, bytes.length, options);
  if (options.verify) await checkDigest(bytes, name, options.signal);
  const second = secondFile(name, bytes);
  if (second) {
    throw new ModelFileError(
      `${name} has its weights in a second file, ${second.name}: load it by its address, or in Node by the name of the ` +
        "file, so that the second file is found beside it",
    );
  }
  return { name, bytes };
}

/** Return the second file of a model. Throw ModelFileError unless the bytes are a model. */
function secondFile(name: string, bytes: Uint8Array): WeightsFile | undefined {
  return readingFile(name, () => weightsFileOf(readMetadata(bytes)));
}

function mustFit(name: string, bytes: number, { maxBytes = Infinity }: SourceOptions): void {
  if (bytes <= maxBytes) return;
  const [found, limit] = [bytes, maxBytes].map((number) => number.toLocaleString("en-US"));
  throw new ModelFileError(
    `${name} is too large: it has ${found} bytes, and at most ${limit} are left for it here: export a smaller or ` +
      "quantised model",
  );
}

async function fromDisk(address: string | URL, options: SourceOptions): Promise<ModelSource> {
  const [{ realpath }, { basename, dirname, join }, { fileURLToPath }] = await Promise.all([
    import("node:fs/promises"),
    import("node:path"),
    import("node:url"),
  ]);
  const name = String(address).startsWith("file:") ? fileURLToPath(address) : String(address);
  const path = await onDisk(name, () => realpath(name)); // onnxruntime follows no link out of the folder
  const bytes = await readFromDisk(name, path, options);
  if (options.verify) await checkDigest(bytes, name, options.signal);
  const source = { name, bytes, path: { folder: dirname(path), file: basename(path) } };
  const second = secondFile(name, bytes);
  if (!second) return source;
  const secondPath = join(dirname(path), second.name);
  const isMapped = options.mapsWeights === "file"; // onnxruntime reads it by itself
  if (isMapped && !options.verify) return source;
  const maxBytes = options.maxBytes === undefined ? undefined : options.maxBytes - bytes.length;
  const weights = await readFromDisk(secondPath, secondPath, { ...options, maxBytes });
  if (options.verify) await checkWeights(weights, second, secondPath, options.signal);
  return isMapped ? source : { ...source, dataFiles: new Map([[second.name, weights]]) };
}

async function readFromDisk(name: string, path: string, options: SourceOptions): Promise<Uint8Array> {
  const { open } = await import("node:fs/promises");
  return onDisk(name, async () => {
    const file = await open(path);
    try {
      const status = await file.stat();
      if (status.isDirectory()) throw Object.assign(new Error(), { code: "EISDIR" });
      if (!status.isFile()) throw new ModelFileError(`${name} is not a regular file: give the name of a model file`);
      mustFit(name, status.size, options);
      const bytes = new Uint8Array(status.size);
      let place = 0;
      while (place < bytes.length) {
        checkAborted(options.signal);
        const { bytesRead } = await file.read(bytes, place, Math.min(READ_BYTES, bytes.length - place), place);
        if (!bytesRead) break;
        place += bytesRead;
      }
      return bytes.subarray(0, place);
    } finally {
      await file.close();
    }
  });
}

/** Run a call of the file system, whose errors become ModelFileError. */
async function onDisk<T>(name: string, call: () => Promise<T>): Promise<T> {
  try {
    return await call();
  } catch (error) {
    const { code } = error as { code?: string };
    if (code === undefined) throw error;
    if (code === "ENOENT") throw new ModelFileError(`${name} does not exist`, undefined, error);
    if (code === "EISDIR") throw new ModelFileError(`${name} is a folder, not a model file`, undefined, error);
    throw new ModelFileError(`${name} cannot be read: ${errorSummary(error)}`, undefined, error);
  }
}

async function fromServer(address: string, options: SourceOptions): Promise<ModelSource> {
  const { verify, signal, mapsWeights = "bytes", maxBytes = Infinity } = options;
  const bytes = await verified(address, options, async (file) => {
    if (verify) await checkDigest(file, address, signal);
    secondFile(address, file); // a damaged file in the store is loaded again also without a digest
  });
  const second = secondFile(address, bytes);
  if (!second) return { name: address, bytes };
  if (mapsWeights === "file") {
    throw new UnsupportedCallError(
      `${address} has its weights in a second file, which device node reads from the disk alone: download both files, or ` +
        "choose device wasm",
    );
  }
  const beside = besideOf(address, second.name);
  const { onProgress } = options;
  const more = {
    ...options,
    maxBytes: maxBytes - bytes.length,
    onProgress:
      onProgress &&
      (({ loaded, total }: Progress) =>
        onProgress({ loaded: loaded + bytes.length, total: total && total + bytes.length })),
  };
  const weights = await verified(beside, more, async (file) => {
    if (verify) await checkWeights(file, second, beside, signal);
  });
  return { name: address, bytes, dataFiles: new Map([[second.name, weights]]) };
}

/** Download a file and check it. One from the store that is damaged is loaded again. */
async function verified(
  address: string,
  options: DownloadOptions,
  check: (bytes: Uint8Array) => Promise<void>,
): Promise<Uint8Array> {
  for (let attempt = 1; ; attempt++) {
    // A store that cannot delete is left alone at last.
    const store = attempt <= 2 ? options.store : undefined;
    const { bytes, wasKept, forget } = await download(address, { ...options, store });
    try {
      await check(bytes);
      return bytes;
    } catch (error) {
      if (!(error instanceof ModelFileError)) throw error;
      await forget();
      if (!wasKept) throw error;
    }
  }
}

/** Return the address of a file next to another. */
function besideOf(address: string, name: string): string {
  const [path, ...query] = address.split("?");
  return [path.slice(0, path.lastIndexOf("/") + 1) + encodeURIComponent(name), ...query].join("?");
}
