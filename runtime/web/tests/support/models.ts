/** The model files that tests open, with their golden files: `export_models.py` makes those that are missing or old. */

import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import type { Json } from "./goldenValues.js";

const REPOSITORY = resolve(import.meta.dirname, "../../../..");
const PYTHON = process.env["PYTHON"] ?? resolve(REPOSITORY, ".venv/bin/python");
const FOLDER = resolve(REPOSITORY, "build/web");

/** Return the name of a model file. */
export function modelPath(name: string): string {
  return join(FOLDER, `${name}.onnx`);
}

/** Return the bytes of a model file. */
export function modelBytes(name: string): Uint8Array {
  return new Uint8Array(readFileSync(modelPath(name)));
}

/** Return the golden file of a model file. */
export function goldenOf(name: string): Json {
  return JSON.parse(readFileSync(join(FOLDER, `${name}.golden.json`), "utf8"));
}

/** Make the files. Vitest runs it once, before all tests. */
export default function setup(): void {
  execFileSync(PYTHON, [join(import.meta.dirname, "export_models.py"), FOLDER], {
    env: { ...process.env, TFORMER_KERNELS: "0", OMP_NUM_THREADS: "1", PYTHONDONTWRITEBYTECODE: "1" },
    stdio: ["ignore", "inherit", "inherit"],
  });
}
