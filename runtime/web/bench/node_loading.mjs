// A process that loads a model with one engine, reads a text and ends. It prints its times, from its start.
import { basename, dirname } from "node:path";
import { TEXT } from "./loading_texts.mjs";

process.env.ORT_DISABLE_TELEMETRY ??= "1"; // of transformers.js too
const [engine, path] = process.argv.slice(2);
let embed;
if (engine === "tformer") {
  const { Model } = await import("../dist/index.js");
  const model = await Model.load(path, { device: "node" });
  embed = async (text) => (await model.embed([text]))[0];
} else {
  const { env, pipeline } = await import("@huggingface/transformers");
  Object.assign(env, { allowRemoteModels: false, localModelPath: dirname(path) });
  const extract = await pipeline("feature-extraction", basename(path), { dtype: "fp32", device: "cpu" });
  embed = async (text) => (await extract(text, { pooling: "mean", normalize: true })).data;
}
const loaded = performance.now();
const vector = await embed(TEXT);
console.log(JSON.stringify({ loaded, first: performance.now(), vector: [...vector] }));
process.exit(0);
