/** The options of a model's calls, which a model of this thread and one of a worker share. */

import type { WasmOptions } from "./backend/wasmSession.js";
import type { CachedPrefix, CallOptions } from "./chat.js";
import type { Progress } from "./loading/download.js";
import type { ModelStore } from "./loading/store.js";
import type { ImageInput } from "./preprocess/images.js";

/** The public properties and methods of a class. */
export type Public<T> = Pick<T, keyof T>;

/** How a model is loaded. */
export interface LoadOptions extends Pick<WasmOptions, "wasmUrl" | "wasmBinary"> {
  /**
   * "node", "wasm", "webgpu", or "auto" (the default): in Node onnxruntime-node if it is installed, in browsers the GPU for
   * files that suit it, and else WebAssembly. `Model.device` says which.
   */
  readonly device?: string;
  /** Threads of one operator; by default the tuned number of the file, or one per core; in a browser 1 to 4. */
  readonly threads?: number;
  /** Compare the file with its digest, so that damage is an error. The default is true. */
  readonly verify?: boolean;
  readonly signal?: AbortSignal;
  /** Called while the file is downloaded. */
  readonly onProgress?: (progress: Progress) => void;
  /**
   * Where a downloaded file is kept for the next time: "cache-api" (the default in pages), "opfs" (the origin private file
   * system), false (nowhere; the default in Node), or a store of your own. A file that has changed is loaded again.
   */
  readonly cache?: "cache-api" | "opfs" | false | ModelStore;
  /** Refuse a model of more bytes before it is downloaded. WebAssembly's memory has 4 GB. */
  readonly maxBytes?: number;
  /**
   * Run the model in a worker, so that the page stays free while it computes: the default in pages. The worker is the file
   * worker.js next to this one. Functions as options, such as logitsProcessor, cannot be sent to it.
   */
  readonly worker?: boolean;
}

/** Options of a call for one input. */
export type GenerateOptions = CallOptions & {
  /** A cached prefix that goes before the input, from `cachePrefix`. */
  readonly prefix?: CachedPrefix;
  /** The images of a prompt, for a model that reads them, in the order of their markers in the text. */
  readonly images?: readonly ImageInput[];
};

/** Options of a call for many inputs. */
export type BatchOptions = CallOptions & {
  /** Inputs that are computed together; 32 by default. */
  readonly batchSize?: number;
  /** A cached prefix that goes before each input, from `cachePrefix`. */
  readonly prefix?: CachedPrefix;
};

/** Options of a call that reads given tokens. */
export interface ReadOptions {
  /** The name of the adapter to use, in a file with adapters. */
  readonly adapter?: string;
  readonly signal?: AbortSignal;
}

/** Options of `predict`. */
export interface PredictOptions {
  /** Cut inputs that are too long, of a pair the longer text first; otherwise they throw InputError. */
  readonly truncate?: boolean;
  /** Inputs of similar length that are computed together. */
  readonly batchSize?: number;
  /** The name of the adapter to use, in a file with adapters. */
  readonly adapter?: string;
  readonly signal?: AbortSignal;
  /** Settings of the task, such as topK. */
  readonly [setting: string]: unknown;
}

/** Labels of attention weights. */
export interface AttentionLabels {
  /** Of the source positions. */
  readonly source: string[];
  /** Of the generated tokens. */
  readonly tokens: string[];
}
