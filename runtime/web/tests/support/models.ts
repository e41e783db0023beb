/** The model files that tests open, with their golden files: `export_models.py` makes those that are missing or old. */

import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import type { StoredProducts } from "../../src/format/manifest.js";
import { manifestOf, readMetadata } from "../../src/format/modelFile.js";
import type { Json } from "./goldenValues.js";

export const REPOSITORY = resolve(import.meta.dirname, "../../../..");
const PYTHON = process.env["PYTHON"] ?? resolve(REPOSITORY, ".venv/bin/python");
const FOLDER = resolve(REPOSITORY, "build/web");

/** Return the name of a model file. */
export function modelPath(name: string): string {
  return join(FOLDER, `${name}.onnx`);
}

/** Return the records of the quantised products of a file. */
export function recordsOf(file: Uint8Array): StoredProducts {
  return manifestOf(readMetadata(file)).storedProducts;
}

/** Return the bytes of a model file. */
export function modelBytes(name: string): Uint8Array {
  return new Uint8Array(readFileSync(modelPath(name)));
}

/** Return the golden file of a model file. */
export function goldenOf(name: string): Json {
  return JSON.parse(readFileSync(join(FOLDER, `${name}.golden.json`), "utf8"));
}

/** Run a script of this repository, with onnxruntime's own operators. */
export function runPython(script: string, ...args: readonly string[]): void {
  execFileSync(PYTHON, [script, ...args], {
    env: { ...process.env, TFORMER_KERNELS: "0", OMP_NUM_THREADS: "1", PYTHONDONTWRITEBYTECODE: "1" },
    stdio: ["ignore", "inherit", "inherit"],
  });
}

/** Make the files. Vitest runs it once, before all tests. */
export default function setup(): void {
  runPython(join(import.meta.dirname, "export_models.py"), FOLDER);
}
