import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { expect, test } from "vitest";

const SOURCE = resolve(import.meta.dirname, "../src");
// A folder imports only itself and the folders before it. Files of src/ itself may import all.
const ORDER = ["base", "format", "preprocess", "backend", "engine", "decoding", "tasks", "loading", "worker"];

const PAGE = resolve(import.meta.dirname, "../../tformer_serve/page");
const DEMO = resolve(import.meta.dirname, "../demo");

/** The files that a script imports. */
function imports(file: string): string[] {
  const text = readFileSync(file, "utf8");
  return [...text.matchAll(/(?:from|import\()\s*"([^"]+)"/g)].map(([, path]) => resolve(dirname(file), path));
}

test("a folder imports only the folders before it", () => {
  const files = readdirSync(SOURCE, { recursive: true, encoding: "utf8" }).filter((file) => file.endsWith(".ts"));
  expect(files.length).toBeGreaterThan(40);
  for (const file of files) {
    const [folder, ...rest] = file.split("/");
    if (!rest.length) continue;
    expect(ORDER, file).toContain(folder);
    const text = readFileSync(join(SOURCE, file), "utf8");
    for (const [, path] of text.matchAll(/(?:from|import\()\s*"(\.[^"]+)"/g)) {
      const target = relative(SOURCE, resolve(SOURCE, dirname(file), path)).split("/");
      expect(target.length, `${file} imports ${path}`).toBe(2);
      expect(ORDER.indexOf(target[0]), `${file} imports ${path}`).toBeLessThanOrEqual(ORDER.indexOf(folder));
    }
  }
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
