import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { expect, test } from "vitest";

const SOURCE = resolve(import.meta.dirname, "../src");
// A folder imports only itself and the folders before it. Files of src/ itself may import all.
const ORDER = ["base", "format", "preprocess", "backend", "engine", "decoding", "tasks", "loading", "worker"];
const MAX_FILES = 20; // in one folder

const PAGE = resolve(import.meta.dirname, "../../tformer_serve/page");
const DEMO = resolve(import.meta.dirname, "../demo");

/** The files that a script imports, also late or for their types. */
function imports(file: string): string[] {
  const text = readFileSync(file, "utf8");
  return [...text.matchAll(/(?:from|import)[\s(]*"(\.[^"]+)"/g)].map(([, path]) => resolve(dirname(file), path));
}

/** The files of the library, each with those that it imports. */
const IMPORTS = new Map(
  readdirSync(SOURCE, { recursive: true, encoding: "utf8" })
    .filter((file) => file.endsWith(".ts"))
    .map((file) => {
      const targets = imports(join(SOURCE, file)).map((target) => relative(SOURCE, target).replace(/js$/, "ts"));
      return [file, targets] as const;
    }),
);

test("a folder is small, and imports only the folders before it", () => {
  expect(IMPORTS.size).toBeGreaterThan(40);
  for (const [file, targets] of IMPORTS) {
    const [folder, ...rest] = file.split("/");
    if (!rest.length) continue;
    expect(ORDER, file).toContain(folder);
    expect(readdirSync(join(SOURCE, folder)).length, folder).toBeLessThanOrEqual(MAX_FILES);
    for (const target of targets) {
      const [targetFolder, ...name] = target.split("/");
      expect(name.length, `${file} imports ${target}`).toBe(1);
      expect(ORDER.indexOf(targetFolder), `${file} imports ${target}`).toBeLessThanOrEqual(ORDER.indexOf(folder));
    }
  }
});

test("no files import each other in a circle", () => {
  const done = new Set<string>();
  const circles: string[] = [];
  const follow = (file: string, path: readonly string[]) => {
    const begin = path.indexOf(file);
    if (begin >= 0) circles.push([...path.slice(begin), file].join(" → "));
    if (begin >= 0 || done.has(file)) return;
    for (const target of IMPORTS.get(file)!) follow(target, [...path, file]);
    done.add(file);
  };
  for (const file of IMPORTS.keys()) follow(file, []);
  expect(circles).toEqual([]);
});

test("components of the pages import one another alone, and a page them and its own files", () => {
  const components = join(PAGE, "components");
  const scripts = (folder: string) => readdirSync(folder).filter((name) => /(?<!service-worker)\.js$/.test(name));
  const allowed = {
    [components]: scripts(components).map((name) => join(components, name)),
    [PAGE]: [
      ...scripts(components).map((name) => join(components, name)),
      ...scripts(PAGE).map((name) => join(PAGE, name)),
    ],
    [DEMO]: [
      ...scripts(components).map((name) => join(components, name)),
      ...scripts(DEMO).map((name) => join(DEMO, name)),
      join(SOURCE, "index.js"),
    ],
  };
  expect(allowed[components].length).toBeGreaterThan(5);
  for (const [folder, files] of Object.entries(allowed)) {
    for (const name of scripts(folder)) {
      for (const path of imports(join(folder, name))) expect(files, `${name} of ${folder}`).toContain(path);
    }
  }
});
