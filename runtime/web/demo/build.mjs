// Builds the page, static files: node demo/build.mjs FOLDER MODEL…
//
// FOLDER: for the page: a new or an empty one, or that of an earlier build, whose files are replaced and no others. MODEL:
// files that are copied to models/.
import { createHash } from "node:crypto";
import { existsSync, lstatSync, readFileSync, readdirSync, statSync } from "node:fs";
import { copyFile, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const SOURCE = import.meta.dirname;
const COMPONENTS = join(SOURCE, "../../tformer_serve/page/components");
const ORT = "onnxruntime-web/ort-wasm-simd-threaded";
const WORKER = "service-worker.js"; // it begins with the list of all files: a later build knows by it what this one wrote
const NAMES = String.raw`\[(?:"[\w./-]+"(?:,"[\w./-]+")*)?\]`;
const LIST = new RegExp(`^const FILES = (${NAMES}), (?:MODELS = (${NAMES}), )?VERSION = `);
const BUILT = /^(models\/)?[\w-][\w.-]*$/; // a file that a build writes

const [folder, ...models] = process.argv.slice(2);
if (folder === undefined) refuse("usage: node demo/build.mjs FOLDER MODEL…", 2);
const DIST = resolve(folder);
const copies = new Map(models.map((path) => [`models/${basename(path)}`, path])); // name in the folder → file
const twice = models.find((path) => copies.get(`models/${basename(path)}`) !== path);
if (twice) refuse(`${twice} and ${copies.get(`models/${basename(twice)}`)} have the same name`);
if (existsSync(DIST) && !statSync(DIST).isDirectory()) refuse(`${DIST} is not a folder`);
for (const [name, path] of copies) {
  if (!existsSync(path)) refuse(`${path} does not exist`);
  if (!statSync(path).isFile()) refuse(`${path} is not a file`);
  if (!BUILT.test(name)) refuse(`${path} has a name with other characters than letters, digits, "_", "-" and "."`);
}

const pages = await pageFiles();
const head =
  `const FILES = ${JSON.stringify(["./", ...pages.keys()])}, MODELS = ${JSON.stringify([...copies.keys()])}, ` +
  `VERSION = "${digest(pages)}";\n`;
const names = [...pages.keys(), ...copies.keys(), WORKER];
const earlier = earlierFiles();
/** What is at a name of the folder; a link is not followed. */
const at = (name) => lstatSync(join(DIST, name), { throwIfNoEntry: false });
const taken = names.find((name) => !earlier.has(name) && at(name));
if (taken) refuse(`${join(DIST, taken)} is of something else: remove it, or choose another folder`);

await mkdir(join(DIST, "models"), { recursive: true });
for (const name of earlier) if (!names.includes(name)) await rm(join(DIST, name), { force: true });
// Somebody may have put a link in the place of a file: what it leads to stays.
for (const name of names) if (at(name)?.isSymbolicLink()) await rm(join(DIST, name));
// The list is written before the files, so that a later build knows the files of one that does not end.
await writeFile(join(DIST, WORKER), head + (await readFile(join(SOURCE, WORKER), "utf8")));
for (const [name, content] of pages) await writeFile(join(DIST, name), content);
for (const [name, path] of copies) await copyFile(path, join(DIST, name));
console.log(`${DIST} has the page`);

function refuse(sentence, status = 1) {
  console.error(sentence);
  process.exit(status);
}

/** Return the names of the files that an earlier build wrote. Refuse a folder of something else. */
function earlierFiles() {
  if (!existsSync(DIST) || !readdirSync(DIST).length) return new Set();
  const path = join(DIST, WORKER);
  const list = existsSync(path) && LIST.exec(readFileSync(path, "utf8"));
  if (!list) refuse(`${DIST} has files of something else: choose an empty folder, or remove them`);
  const [, files, lists] = list;
  const copied = lists ? JSON.parse(lists) : copies.keys(); // earlier lists did not have the models
  return new Set([WORKER, ...JSON.parse(files), ...copied].filter((name) => BUILT.test(name)));
}

/** Return name → content of the files of the page: all but the models and the service worker. */
async function pageFiles() {
  const { outputFiles } = await build({
    entryPoints: { main: join(SOURCE, "main.js"), worker: join(SOURCE, "../src/worker.ts") },
    bundle: true,
    splitting: true,
    minify: true,
    format: "esm",
    target: "es2022",
    outdir: DIST,
    write: false,
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
  const files = outputFiles.map(({ path, contents }) => [relative(DIST, path), contents]);
  const copied = [
    ...[`${ORT}.mjs`, `${ORT}.wasm`].map((file) => fileURLToPath(import.meta.resolve(file))),
    join(SOURCE, "index.html"),
    ...["style.css", "icon.svg"].map((name) => join(COMPONENTS, name)),
  ];
  for (const path of copied) files.push([basename(path), await readFile(path)]);
  return new Map(files.sort(([one], [other]) => (one < other ? -1 : 1)));
}

function digest(files) {
  const hash = createHash("sha256");
  for (const content of files.values()) hash.update(content);
  return hash.digest("hex").slice(0, 16);
}
