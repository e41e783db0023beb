// Builds the page, static files: node demo/build.mjs FOLDER MODEL…
//
// FOLDER: for the page. What an earlier build wrote there is removed; a folder with other files is refused. MODEL: files
// that are copied.
import { createHash } from "node:crypto";
import { existsSync, readdirSync } from "node:fs";
import { copyFile, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { basename, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const SOURCE = import.meta.dirname;
const MARK = ".tformer-demo"; // a file of this script
const PAGE = join(SOURCE, "../../tformer_serve/page");
const ORT = "onnxruntime-web/ort-wasm-simd-threaded";

const [folder, ...models] = process.argv.slice(2);
if (folder === undefined) {
  console.error("usage: node demo/build.mjs FOLDER MODEL…");
  process.exit(2);
}
const DIST = resolve(folder);
const present = existsSync(DIST) ? readdirSync(DIST) : [];
if (present.length && !present.includes(MARK)) {
  console.error(`${DIST} has files of something else: choose an empty folder, or remove them`);
  process.exit(1);
}
for (const name of present) await rm(join(DIST, name), { recursive: true });
await mkdir(join(DIST, "models"), { recursive: true });
await writeFile(join(DIST, MARK), "");
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

const entries = (await readdir(DIST, { withFileTypes: true })).filter((one) => one.isFile() && one.name !== MARK);
const files = entries.map((one) => one.name);
const hash = createHash("sha256");
for (const name of files.sort()) hash.update(await readFile(join(DIST, name)));
const head = `const FILES = ${JSON.stringify(["./", ...files])}, VERSION = "${hash.digest("hex").slice(0, 16)}";\n`;
await writeFile(join(DIST, "service-worker.js"), head + (await readFile(join(SOURCE, "service-worker.js"), "utf8")));
for (const path of models) await copyFile(path, join(DIST, "models", basename(path)));
console.log(`${DIST} has the page`);
