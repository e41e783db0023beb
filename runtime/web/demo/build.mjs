// Builds the page into demo/dist, or the folder DEMO: static files. Arguments: model files, which are copied.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const SOURCE = import.meta.dirname;
const DIST = process.env.DEMO ?? join(SOURCE, "dist");
const PAGE = join(SOURCE, "../../tformer_serve/page");
const ORT = "onnxruntime-web/ort-wasm-simd-threaded";

await rm(DIST, { recursive: true, force: true });
await mkdir(join(DIST, "models"), { recursive: true });
await build({
  entryPoints: { main: join(SOURCE, "main.js"), worker: join(SOURCE, "../src/worker.ts") },
  bundle: true,
  splitting: true,
  minify: true,
  format: "esm",
  target: "es2022",
  outdir: DIST,
  external: ["onnxruntime-node", "node:*"],
  plugins: [
    {
      name: "beside-the-bundle",
      setup({ onResolve }) {
        onResolve({ filter: /^onnxruntime-web\// }, ({ path }) => ({ path: `./${basename(path)}`, external: true }));
      },
    },
  ],
});
for (const file of [`${ORT}.mjs`, `${ORT}.wasm`]) {
  await copyFile(fileURLToPath(import.meta.resolve(file)), join(DIST, basename(file)));
}
for (const name of ["index.html", "demo.css"]) await copyFile(join(SOURCE, name), join(DIST, name));
for (const name of ["style.css", "icon.svg"]) await copyFile(join(PAGE, name), join(DIST, name));

const files = (await readdir(DIST, { withFileTypes: true })).filter((one) => one.isFile()).map((one) => one.name);
const hash = createHash("sha256");
for (const name of files.sort()) hash.update(await readFile(join(DIST, name)));
const head = `const FILES = ${JSON.stringify(["./", ...files])}, VERSION = "${hash.digest("hex").slice(0, 16)}";\n`;
await writeFile(join(DIST, "service-worker.js"), head + (await readFile(join(SOURCE, "service-worker.js"), "utf8")));
for (const path of process.argv.slice(2)) await copyFile(path, join(DIST, "models", basename(path)));
console.log(`${DIST} has the page`);
