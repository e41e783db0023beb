/** The model files that tests open: those of this repository, exported to build/ if they are not there. */

import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync } from "node:fs";
import { resolve } from "node:path";

const REPOSITORY = resolve(import.meta.dirname, "../../../..");
const PYTHON = process.env["PYTHON"] ?? resolve(REPOSITORY, ".venv/bin/python");

/** File in build/ → the folder in models/, and arguments of the export. */
const FILES: Readonly<Record<string, readonly string[]>> = {
  g2p: ["models/g2p/model.pt"],
  "g2p-int8": ["models/g2p/model.pt", "--quantize", "int8"],
  "g2p-extras": [
    "models/g2p/model.pt",
    "--cross-attentions",
    "--hidden-states",
    "decoder_norm",
    "--hidden-states",
    "encoder_norm",
  ],
  words: ["models/words/model.pt"],
  languages: ["models/languages/model.pt"],
  elnino: ["models/elnino/model.pt"],
};

/** Return the name of a model file. */
export function modelPath(name: string): string {
  return resolve(REPOSITORY, "build", `${name}.onnx`);
}

/** Return the bytes of a model file. */
export function modelBytes(name: string): Uint8Array {
  return new Uint8Array(readFileSync(modelPath(name)));
}

/** Export the files that are missing. Vitest runs it once, before all tests. */
export default function setup(): void {
  mkdirSync(resolve(REPOSITORY, "build"), { recursive: true });
  for (const [name, args] of Object.entries(FILES)) {
    const output = modelPath(name);
    if (existsSync(output)) continue;
    const path = ["", "runtime", "models"].map((folder) => resolve(REPOSITORY, folder)).join(":");
    execFileSync(PYTHON, ["-c", "from tformer_export.cli import main; main()", ...args, "--output", output], {
      cwd: REPOSITORY,
      env: { ...process.env, PYTHONPATH: path, PYTHONDONTWRITEBYTECODE: "1" },
      stdio: ["ignore", "ignore", "inherit"],
    });
  }
}
