// Prints the results of bench.mjs as tables of Markdown (docs/benchmarks/web.md), and the sizes of what a page loads.
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { gzipSync } from "node:zlib";
import { median } from "./median.mjs";

const HERE = import.meta.dirname;
const results = JSON.parse(readFileSync(resolve(HERE, "../../../build/web-bench.json"), "utf8"));
const PLACES = { node: "Node, native", wasm: "Node, WebAssembly", chromium: "Chromium" };

function number(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

/** The median, with the quartiles: the spread of rounds on a machine that does other work, too. */
function times(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return `${number(median(values))} (${number(at(0.25))}–${number(at(0.75))})`;
}

/** The ratio of the medians. */
function ratio(one, other) {
  return (median(one) / median(other)).toFixed(2);
}

function equalTokens(tokens, key) {
  const [name] = key.split(" ");
  const reference = Object.entries(results).find(([other]) => other.startsWith(`${name} fp32 `))?.[1];
  const expected = reference?.measured["tformer"].tokens;
  return expected ? `${tokens.filter((token, i) => token === expected[i]).length} of ${tokens.length}` : "";
}

const HEAD = ["model", "where, threads", "first token", "of processors", "a step", "of processors", "tokens", "memory"];
console.log(`| ${HEAD.join(" | ")} |\n|${" --- |".repeat(HEAD.length)}`);
const machines = new Set();
for (const [key, { cpu, flags, load, measured }] of Object.entries(results).sort(([one], [other]) =>
  one.localeCompare(other),
)) {
  const [name, precision, device, threads] = key.split(" ");
  const [ours, theirs] = [measured["tformer"], measured["transformers.js"]];
  const cells = ["first", "cpuFirst", "step", "cpuStep"].map((kind) => {
    if (!ours[kind]) return "";
    const [one, other] = [ours[kind], theirs?.[kind]];
    return other ? `${times(one)}; ${times(other)}; **${ratio(other, one)}**` : times(one);
  });
  const both = (of) => [ours, theirs].filter(Boolean).map(of).join("; ");
  const tokens = both(({ tokens }) => equalTokens(tokens, key));
  const memory = both(({ rss }) => (rss / 1e6).toFixed(0));
  console.log(
    `| ${name} ${precision} | ${PLACES[device]}, ${threads} | ${cells.join(" | ")} | ${tokens} | ${memory} |`,
  );
  machines.add(`${cpu}, ${flags.join(", ")}; load ${load.join(" to ")}`);
}
console.log([...machines].join("\n"));

const kilobytes = (...paths) =>
  paths.reduce((sum, path) => sum + gzipSync(readFileSync(path), { level: 9 }).length, 0) / 1e3;
const bundle = join(HERE, "../dist/bundle");
/** Return a script of the bundle and all that it imports. */
function withImports(name, found = new Set()) {
  if (found.has(name)) return found;
  found.add(name);
  const text = readFileSync(join(bundle, name), "utf8");
  for (const [, path] of text.matchAll(/(?:from|import)\s*"\.\/([^"]+\.js)"/g)) withImports(path, found);
  return found;
}
const wasm = "ort-wasm-simd-threaded";
const peer = join(HERE, "node_modules/@huggingface/transformers/dist/transformers.web.min.js");
const ort = join(HERE, "node_modules/onnxruntime-web/dist");
const size = (label, scripts, binary) =>
  console.log(
    `${label}: scripts ${kilobytes(...scripts).toFixed(0)} kB, with WebAssembly ${kilobytes(...scripts, ...binary).toFixed(0)} kB (gzip)`,
  );
const gpuScript = readdirSync(bundle).find((name) => name.startsWith("webgpuSession"));
for (const [label, kind, script] of [
  ["tformer, for WebAssembly", wasm, "tformer.js"],
  ["tformer, for WebGPU", `${wasm}.asyncify`, gpuScript],
]) {
  const names = [...withImports(script, withImports("tformer.js")), `${kind}.mjs`];
  size(
    label,
    names.map((name) => join(bundle, name)),
    [join(bundle, `${kind}.wasm`)],
  );
}
if (existsSync(peer)) {
  const kind = "asyncify"; // the build that its default import loads
  size("transformers.js", [peer, join(ort, "ort.webgpu.bundle.min.mjs")], [join(ort, `${wasm}.${kind}.wasm`)]);
}
