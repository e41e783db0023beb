// Bundles the library for browsers and checks the size of what a page loads at once. onnxruntime's wasm, which is loaded
// beside it, and parts that only some models need (such as chat templates) are left out.
import { readFile } from "node:fs/promises";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const MAX_GZIP_BYTES = 60_000;

const { metafile } = await build({
  entryPoints: { tformer: "src/index.ts" },
  bundle: true,
  splitting: true,
  minify: true,
  format: "esm",
  platform: "browser",
  target: "es2022",
  outdir: "dist/bundle",
  external: ["onnxruntime-node", "onnxruntime-web/*", "node:*"],
  metafile: true,
});

const gzipBytes = async (path) => gzipSync(await readFile(path), { level: 9 }).length;
const atOnce = new Set();
const waiting = ["dist/bundle/tformer.js"];
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
