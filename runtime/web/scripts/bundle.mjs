// Bundles the library for browsers and checks its size: onnxruntime's wasm, which is loaded beside it, is left out.
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const MAX_GZIP_BYTES = 60_000;

const result = await build({
  entryPoints: ["src/index.ts"],
  bundle: true,
  minify: true,
  format: "esm",
  platform: "browser",
  target: "es2022",
  outfile: "dist/tformer.bundle.js",
  external: ["onnxruntime-node", "onnxruntime-web/*", "node:*"],
  metafile: true,
});
const [output] = Object.values(result.metafile.outputs);
const { readFile } = await import("node:fs/promises");
const size = gzipSync(await readFile("dist/tformer.bundle.js"), { level: 9 }).length;
const parts = {};
for (const [path, { bytesInOutput }] of Object.entries(output.inputs)) {
  const name = path.startsWith("node_modules/") ? path.split("/").slice(1, 3).join("/") : "src";
  parts[name] = (parts[name] ?? 0) + bytesInOutput;
}
for (const [name, bytes] of Object.entries(parts)) console.log(`${name}: ${bytes} bytes minified`);
console.log(`bundle: ${output.bytes} bytes minified, ${size} bytes gzip (at most ${MAX_GZIP_BYTES})`);
if (size > MAX_GZIP_BYTES) {
  console.error(`the bundle has ${size} bytes in gzip, more than ${MAX_GZIP_BYTES}: leave something out`);
  process.exit(1);
}
