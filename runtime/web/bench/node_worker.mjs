// A process with one model of one engine, which runs requests that its parent sends.
import { peerRunner, tformerRunner } from "./engines.mjs";

process.env.ORT_DISABLE_TELEMETRY ??= "1"; // of transformers.js too
const [engine, path, precision, device, threads] = process.argv.slice(2);
const count = Number(threads);

async function open() {
  if (engine === "tformer") {
    const { Model } = await import("../dist/index.js");
    return tformerRunner(await Model.load(path, { device, threads: count }));
  }
  if (device === "wasm") {
    // It has no WebAssembly in Node by itself. This is the build for Node of its own version of onnxruntime-web.
    const ort = await import("onnxruntime-web");
    globalThis[Symbol.for("onnxruntime")] = ort;
  }
  const library = await import("@huggingface/transformers");
  if (device === "wasm") {
    Object.assign(library.env.backends.onnx.wasm, { numThreads: count, wasmPaths: undefined });
  }
  library.env.useWasmCache = false;
  const session = device === "wasm" ? { executionProviders: ["wasm"] } : { intraOpNumThreads: count };
  return peerRunner(library, path, precision, device === "wasm" ? "auto" : "cpu", session);
}

const { generate, logits } = await open();
process.send({ ready: true });
process.on("message", async (request) => {
  if (request.logitsOf) {
    const rows = [];
    for (const ids of request.logitsOf) rows.push(await logits(ids));
    process.send(rows);
    return;
  }
  const begin = process.cpuUsage();
  const result = await generate(request);
  const { user, system } = process.cpuUsage(begin);
  process.send({ ...result, cpuMs: (user + system) / 1e3, rss: process.memoryUsage().rss });
});
