import { env, pipeline } from "@huggingface/transformers";
import { TEXT } from "./loading_texts.mjs";

Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/" });
env.backends.onnx.wasm.wasmPaths = "/ort/";
const extract = await pipeline("feature-extraction", location.search.slice(1), { dtype: "fp32", device: "wasm" });
const loaded = performance.now(); // from the beginning of the page
const { data } = await extract(TEXT, { pooling: "mean", normalize: true });
window.result = { loaded, first: performance.now(), vector: [...data] };
