import * as library from "@huggingface/transformers";
import { peerRunner } from "./engines.mjs";

window.open_ = async ({ path, precision, threads }) => {
  Object.assign(library.env.backends.onnx.wasm, { numThreads: threads, wasmPaths: "/ort/" });
  library.env.useBrowserCache = false;
  library.env.useWasmCache = false;
  window.run = (await peerRunner(library, path, precision, "wasm")).generate;
};
