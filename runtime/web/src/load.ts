/** `Model.load`: open a model file in this thread, or in a worker of the page. */

import { checkAborted, OptionError } from "./base/errors.js";
import { checkBoolean, checkInt, checkNames, invalidValue, MAX_THREADS } from "./base/validation.js";
import { chooseDevice, isNode } from "./backend/devices.js";
import { Engine } from "./engine/engine.js";
import type { ModelAddress } from "./loading/source.js";
import { Model as LocalModel } from "./model.js";
import { loadParts } from "./modelParts.js";
import type { LoadOptions, Public } from "./modelTypes.js";

const LOAD_OPTIONS = [
  "device",
  "threads",
  "verify",
  "signal",
  "onProgress",
  "cache",
  "maxBytes",
  "worker",
  "wasmUrl",
  "wasmBinary",
];
const WASM_BYTES = 2 ** 32;

/** An exported model, in this thread or in a worker. */
export type Model = Public<LocalModel>;

/** Loads exported models. */
export const Model = { load };

/**
 * Load a file of tformer-export.
 *
 * address: the name of a file (in Node), its address, its bytes, or a File.
 * Throw ModelFileError, DeviceError, OptionError, AbortedError, or MissingExtraError without onnxruntime-node.
 */
async function load(address: ModelAddress, options: LoadOptions = {}): Promise<Model> {
  checkNames(Object.keys(options), LOAD_OPTIONS);
  const { device = "auto", verify = true, threads, signal, onProgress, wasmUrl, wasmBinary } = options;
  checkBoolean("verify", verify);
  checkAborted(signal);
  if (onProgress !== undefined && typeof onProgress !== "function") {
    throw invalidValue("onProgress", "a function", onProgress);
  }
  if (options.maxBytes !== undefined) checkInt("maxBytes", options.maxBytes, 1, Number.MAX_SAFE_INTEGER);
  const isPage = !isNode() && typeof document !== "undefined" && typeof Worker === "function";
  if (checkBoolean("worker", options.worker ?? isPage)) {
    if (!isPage)
      throw new OptionError("worker must be false outside a page: a worker of a page runs the model", "worker");
    return (await import("./remoteModel.js")).loadInWorker(address, options);
  }
  // A page whose models are in workers does not load their code.
  const [{ readSource }, { storeOf }] = await Promise.all([
    import("./loading/source.js"),
    import("./loading/store.js"),
  ]);
  const store = await storeOf(options.cache);
  if (threads !== undefined) checkInt("threads", threads, 1, MAX_THREADS);
  const choice = await chooseDevice(device, { threads, wasmUrl, wasmBinary });
  const { mapsWeights } = choice;
  const maxBytes = Math.min(options.maxBytes ?? Infinity, mapsWeights === "bytes" ? WASM_BYTES : Infinity);
  const source = await readSource(address, { signal, onProgress, store, maxBytes, verify, mapsWeights });
  const engine = await choice.open(source, (backend) => Engine.open(source, backend));
  try {
    return new LocalModel(engine, await loadParts(engine));
  } catch (error) {
    engine.close();
    throw error;
  }
}
