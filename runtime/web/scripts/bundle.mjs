// Bundles the library for browsers into dist/bundle, which is a whole: a page needs nothing else. Checks the size of what a
// page loads at once: onnxruntime's wasm, and parts that only some models need (such as chat templates), are files beside it.
import { copyFile, readFile, rm } from "node:fs/promises";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const MAX_GZIP_BYTES = 60_000;
const FOLDER = "dist/bundle";
const ORT = "onnxruntime-web/ort-wasm-simd-threaded";

/** The name of a package means nothing in a page without an import map, which strict content security policies forbid. */
const besideTheBundle = {
  name: "beside-the-bundle",
  setup({ onResolve }) {
    onResolve({ filter: /^onnxruntime-web\// }, ({ path }) => ({ path: `./${basename(path)}`, external: true }));
  },
};

await rm(FOLDER, { recursive: true, force: true });

const { metafile } = await build({
  entryPoints: { tformer: "src/index.ts", worker: "src/worker.ts" },
  bundle: true,
  splitting: true,
  minify: true,
  format: "esm",
  platform: "browser",
  target: "es2022",
  outdir: FOLDER,
  external: ["onnxruntime-node", "node:*"],
  plugins: [besideTheBundle],
  metafile: true,
});
// The second pair is loaded for device webgpu alone.
for (const file of [`${ORT}.mjs`, `${ORT}.wasm`, `${ORT}.asyncify.mjs`, `${ORT}.asyncify.wasm`]) {
  await copyFile(fileURLToPath(import.meta.resolve(file)), `${FOLDER}/${basename(file)}`);
}

const gzipBytes = async (path) => gzipSync(await readFile(path), { level: 9 }).length;
const atOnce = new Set();
const waiting = [`${FOLDER}/tformer.js`];
while (waiting.length) {
  const path = waiting.pop();
  if (atOnce.has(path)) continue;
  atOnce.add(path);
  const imports = metafile.outputs[path].imports.filter((one) => one.kind === "import-statement" && !one.external);
  waiting.push(...imports.map((one) => one.path));
}
let total = 0;
for (const path of Object.keys(metafile.outputs)) {
  const bytes = await gzipBytes(path);
  if (atOnce.has(path)) total += bytes;
  const when = atOnce.has(path) ? "at once" : "when needed";
  console.log(`${path}: ${metafile.outputs[path].bytes} bytes minified, ${bytes} bytes gzip, loaded ${when}`);
}
console.log(`loaded at once: ${total} bytes gzip (at most ${MAX_GZIP_BYTES})`);
if (total > MAX_GZIP_BYTES) {
  console.error(`the bundle has ${total} bytes in gzip, more than ${MAX_GZIP_BYTES}: leave something out`);
  process.exit(1);
}
