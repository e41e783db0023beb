import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { expect, test } from "vitest";

const SOURCE = resolve(import.meta.dirname, "../src");
// A folder imports only itself and the folders before it. Files of src/ itself may import all.
const ORDER = ["base", "format", "preprocess", "backend", "engine", "decoding", "tasks", "loading", "worker"];

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
