// Times from a new process, or from the address of a page, to the first vector of a text: tformer next to transformers.js.
//
//   node bench/loading.mjs MODEL.onnx FOLDER node|chromium [ROUNDS]
//
// MODEL.onnx: an encoder of texts in fp32. FOLDER: the same model in the layout of the hub, for transformers.js
// (`export_encoder.py`). Each round starts both engines once, in turn: a process each, or a browser without any stored file. The
// server is on this machine. Printed are medians and ranges, in milliseconds: until the model is loaded, and until the vector.
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { cpus, loadavg, tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { median } from "./median.mjs";
import { openPage } from "./pages.mjs";

const [model, peer, device, roundsText = "7"] = process.argv.slice(2);
if (!peer || !["node", "chromium"].includes(device)) {
  console.error("usage: node bench/loading.mjs MODEL.onnx FOLDER node|chromium [ROUNDS]");
  process.exit(2);
}
const paths = { tformer: resolve(model), "transformers.js": resolve(peer) };
const folder = mkdtempSync(join(tmpdir(), "tformer-loading-"));

function inProcess(engine) {
  const script = join(import.meta.dirname, "node_loading.mjs");
  return JSON.parse(execFileSync(process.execPath, [script, engine, paths[engine]], { encoding: "utf8" }));
}

async function inBrowser(engine, round) {
  const entry = engine === "tformer" ? "page_loading_tformer.mjs" : "page_loading_peer.mjs";
  const files = { "/models/": dirname(paths[engine]) };
  const page = await openPage(engine, entry, files, join(folder, engine, round), `?${basename(paths[engine])}`);
  try {
    await page.tab.waitForFunction("window.result", { timeout: 120_000 });
    return await page.tab.evaluate(() => window.result);
  } finally {
    await page.end();
  }
}

try {
  const results = { tformer: [], "transformers.js": [] };
  for (let round = 0; round < Number(roundsText); round++) {
    const order = Object.keys(results);
    for (const engine of round % 2 ? order.reverse() : order) {
      results[engine].push(device === "node" ? inProcess(engine) : await inBrowser(engine, String(round)));
    }
  }
  const vectors = Object.values(results).map(([{ vector }]) => vector);
  const difference = Math.max(...vectors[0].map((value, i) => Math.abs(value - vectors[1][i])));
  console.log(
    `${device}, ${cpus()[0].model}, load ${loadavg()[0].toFixed(1)}; vectors differ by ${difference.toExponential(1)}`,
  );
  for (const [engine, all] of Object.entries(results)) {
    const line = ["loaded", "first"].map((key) => {
      const values = all.map((one) => one[key]);
      return `${key} ${median(values).toFixed(0)} (${Math.min(...values).toFixed(0)} to ${Math.max(...values).toFixed(0)})`;
    });
    console.log(`  ${engine}: ${line.join(", ")} ms`);
  }
} finally {
  rmSync(folder, { recursive: true });
}
