// Times of tformer beside transformers.js, on the same weights and the same machine.
//
//   node bench/bench.mjs MODEL PRECISION DEVICE THREADS [ROUNDS [STARTS]]
//
// MODEL: g2p, 60m or 134m. PRECISION: fp32, int8 or int4. DEVICE: node, wasm (in Node) or chromium. Both engines are loaded, in
// a process or a browser each, and run by turns. A round of an engine is some requests of one new token and one of N: the
// median of the first is the time to the first token, and what the last takes longer, over N - 1, is a step. ROUNDS are those
// of a start of both engines, which start in turn: two processes that run the same code differ by 2 %, and the one that was
// loaded later is often the faster one. Results are added to
// build/web-bench.json.
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { cpus, loadavg, tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { median } from "./median.mjs";
import { startProcess } from "./node_process.mjs";
import { openPage } from "./pages.mjs";

const REPOSITORY = resolve(import.meta.dirname, "../../..");
const RESULTS = join(REPOSITORY, "build/web-bench.json");
const ENGINES = ["tformer", "transformers.js"];
const FIRST_TOKENS = 5; // requests of one token in a round
// g2p reads a word of 8 letters. The other requests are those of tests/benchmarks/versus.
const CASES = {
  g2p: { folder: "build/web", prompt: 8, newTokens: 24, vocabulary: 30, low: 4 },
  "60m": { folder: "build/web-large", prompt: 24, newTokens: 32, vocabulary: 32000, low: 10 },
  "134m": { folder: "build/web-large", prompt: 16, newTokens: 16, vocabulary: 32000, low: 10 },
};
const [name, precision, device, threadsText, roundsText = "7", startsText = "1"] = process.argv.slice(2);
const [threads, rounds, starts] = [threadsText, roundsText, startsText].map(Number);
const example = CASES[name];
if (!example || !["fp32", "int8", "int4"].includes(precision) || !["node", "wasm", "chromium"].includes(device)) {
  console.error("usage: node bench/bench.mjs g2p|60m|134m fp32|int8|int4 node|wasm|chromium THREADS [ROUNDS [STARTS]]");
  process.exit(2);
}

/** The file of tformer for a precision. 4 bits are those of --target cpu in native code, of --target web in WebAssembly. */
function modelFile() {
  const suffix = { fp32: "", int8: "-int8", int4: device === "node" ? "-int4" : "-web-int4" }[precision];
  return join(REPOSITORY, example.folder, `${name}${suffix}.onnx`);
}

function seededIds() {
  let state = 7;
  return Array.from({ length: example.prompt }, () => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return example.low + ((state >>> 8) % (example.vocabulary - example.low));
  });
}

async function startPage(engine, path, folder) {
  const entry = engine === "tformer" ? "page_tformer.mjs" : "page_peer.mjs";
  const { tab, browser, end } = await openPage(engine, entry, { "/models/": REPOSITORY }, join(folder, engine));
  await tab.waitForFunction("window.open_", { timeout: 60_000 });
  const address = `/models${path.slice(REPOSITORY.length)}`;
  await tab.evaluate((options) => window.open_(options), { path: address, precision, threads });
  const run = async (request) => {
    const before = renderer(browser.process().pid);
    const result = await tab.evaluate((one) => window.run(one), request);
    const after = renderer(browser.process().pid);
    return { ...result, cpuMs: after.cpuMs - before.cpuMs, rss: after.bytes };
  };
  return { run, end };
}

/** The resident bytes of the largest renderer of a browser, and its processor time so far, in steps of 10 ms. */
function renderer(browser) {
  const parents = new Map();
  for (const pid of readdirSync("/proc").filter((one) => /^\d+$/.test(one))) {
    try {
      const status = readFileSync(`/proc/${pid}/status`, "utf8");
      const bytes = 1024 * Number(/^VmRSS:\s+(\d+)/m.exec(status)?.[1] ?? 0);
      parents.set(Number(pid), { pid, parent: Number(/^PPid:\s+(\d+)/m.exec(status)[1]), bytes });
    } catch {
      continue; // it has ended
    }
  }
  const isInside = (pid) => pid === browser || (parents.has(pid) && isInside(parents.get(pid).parent));
  const isRenderer = (pid) => readFileSync(`/proc/${pid}/cmdline`, "utf8").includes("--type=renderer");
  const inside = [...parents.values()].filter(({ pid }) => isInside(Number(pid)) && isRenderer(pid));
  const { pid, bytes } = inside.reduce((most, one) => (one.bytes > most.bytes ? one : most));
  const fields = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1].split(" ");
  return { bytes, cpuMs: 10 * (Number(fields[11]) + Number(fields[12])) };
}

function processorFlags() {
  const text = readFileSync("/proc/cpuinfo", "utf8");
  const flags = /^flags\s*:\s*(.*)$/m.exec(text)?.[1].split(" ") ?? [];
  return flags.filter((flag) => /^(avx2|fma|avx512f|avx512_vnni|avx_vnni|amx_int8)$/.test(flag));
}

const peerFolder = join(REPOSITORY, example.folder, name, "transformers.js");
const paths = { tformer: modelFile(), ...(existsSync(peerFolder) ? { "transformers.js": peerFolder } : {}) };
const folder = mkdtempSync(join(tmpdir(), "tformer-bench-"));
const request = { prompt: seededIds(), newTokens: example.newTokens };
const measured = Object.fromEntries(
  Object.keys(paths).map((engine) => [engine, { first: [], step: [], cpuFirst: [], cpuStep: [] }]),
);
const running = new Map();

async function endAll() {
  for (const { end } of running.values()) await end();
  running.clear();
}

async function runRound(engine) {
  const { run } = running.get(engine);
  const firsts = [];
  for (let i = 0; i < FIRST_TOKENS; i++) firsts.push(await run({ ...request, newTokens: 1 }));
  const [ms, cpuMs] = [median(firsts.map((one) => one.ms)), median(firsts.map((one) => one.cpuMs))];
  return { first: { ms, cpuMs }, all: await run(request) };
}

try {
  const before = loadavg()[0];
  for (let start = 0; start < starts; start++) {
    const order = Object.entries(paths);
    for (const [engine, path] of start % 2 ? order.reverse() : order) {
      const place = join(folder, String(start));
      running.set(
        engine,
        device === "chromium"
          ? await startPage(engine, path, place)
          : await startProcess(engine, path, precision, device, threads),
      );
    }
    for (let round = -1; round < rounds; round++) {
      const order = round % 2 ? [...running.keys()] : [...running.keys()].reverse();
      for (const engine of order) {
        const { first, all } = await runRound(engine);
        if (round < 0) continue; // the first round warms up
        measured[engine].first.push(first.ms);
        measured[engine].step.push((all.ms - first.ms) / (request.newTokens - 1));
        measured[engine].cpuFirst.push(first.cpuMs);
        measured[engine].cpuStep.push((all.cpuMs - first.cpuMs) / (request.newTokens - 1));
        Object.assign(measured[engine], { tokens: all.tokens, rss: all.rss });
      }
    }
    await endAll();
  }
  const results = existsSync(RESULTS) ? JSON.parse(readFileSync(RESULTS, "utf8")) : {};
  const key = `${name} ${precision} ${device} ${threads}`;
  const load = [before, loadavg()[0]].map((one) => one.toFixed(1));
  results[key] = { cpu: cpus()[0].model, flags: processorFlags(), load, measured };
  writeFileSync(RESULTS, JSON.stringify(results));
  console.log(`${key}: ${cpus()[0].model} (${processorFlags().join(" ")}), load ${load.join(" to ")}`);
  for (const engine of ENGINES.filter((one) => measured[one])) {
    const { first, step, cpuFirst, cpuStep, tokens, rss } = measured[engine];
    const line = [first, step, cpuFirst, cpuStep].map(
      (values) =>
        `${median(values).toFixed(2)} (${Math.min(...values).toFixed(2)} to ${Math.max(...values).toFixed(2)})`,
    );
    console.log(
      `  ${engine}: first token ${line[0]} ms, a step ${line[1]} ms; of processors ${line[2]}, ${line[3]} ms; ${(rss / 1e6).toFixed(0)} MB, ids ${tokens.slice(0, 8)} …`,
    );
  }
} finally {
  await endAll();
  rmSync(folder, { recursive: true });
}
