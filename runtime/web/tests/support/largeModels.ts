/** The models of the size of products, with their golden files: `export_large_models.py` makes those that are missing or old. */

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { REPOSITORY, runPython } from "./models.js";
import type { Json } from "./goldenValues.js";

export const LARGE_FOLDER = resolve(REPOSITORY, "build/web-large");

export function largeModelPath(name: string): string {
  return join(LARGE_FOLDER, `${name}.onnx`);
}

export function largeGolden(name: string): Json {
  return JSON.parse(readFileSync(join(LARGE_FOLDER, `${name}.golden.json`), "utf8"));
}

/** Make the files. Vitest runs it once, before all tests. It takes 20 minutes the first time. */
export default function setup(): void {
  runPython(join(import.meta.dirname, "export_large_models.py"), LARGE_FOLDER);
}
