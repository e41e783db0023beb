/** Expected values, which numpy, Pillow and the Python runtime compute when a test runs. */

import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join, resolve } from "node:path";

const HERE = import.meta.dirname;
const RUNTIME = resolve(HERE, "../../.."); // the folder with tformer_runtime
const PYTHON = process.env["PYTHON"] ?? resolve(RUNTIME, "../.venv/bin/python");

type ArrayOf = {
  float32: Float32Array;
  float64: Float64Array;
  uint8: Uint8Array;
  int32: Int32Array;
  int16: Int16Array;
};
type Dtype = keyof ArrayOf;

/** The cases of a script of this folder: plain values, with arrays that a file next to them holds. */
export class Golden<Case> {
  readonly cases: Case[];
  private readonly bytes: Buffer;

  /** script: writes `cases.json` and `arrays.bin` to the folder that it is given (`golden_file.py`). */
  constructor(script: string) {
    if (!existsSync(PYTHON)) throw new Error(`there is no ${PYTHON}: run make demo, or set PYTHON`);
    const folder = mkdtempSync(join(tmpdir(), "tformer-golden-"));
    try {
      execFileSync(PYTHON, [join(HERE, script), folder], {
        // Native kernels sum attention in another order than the kernels of onnxruntime, which JavaScript has.
        env: {
          ...process.env,
          TFORMER_KERNELS: "0",
          PYTHONPATH: [RUNTIME, HERE].join(delimiter), // scripts import golden_file
          OMP_NUM_THREADS: "1",
          PYTHONDONTWRITEBYTECODE: "1",
        },
        stdio: ["ignore", "inherit", "inherit"],
      });
      this.cases = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8")) as Case[];
      this.bytes = readFileSync(join(folder, "arrays.bin"));
    } finally {
      rmSync(folder, { recursive: true });
    }
  }

  /** Return the array that a value of a case stands for. */
  array<D extends Dtype>(place: { dtype: D; offset: number; shape: number[] }): ArrayOf[D] {
    const { dtype, offset, shape } = place;
    const classes = {
      float32: Float32Array,
      float64: Float64Array,
      uint8: Uint8Array,
      int32: Int32Array,
      int16: Int16Array,
    };
    const Class = classes[dtype];
    const size = shape.reduce((product, axis) => product * axis, 1);
    const copy = new Uint8Array(this.bytes.subarray(offset, offset + size * Class.BYTES_PER_ELEMENT));
    return new Class(copy.buffer) as ArrayOf[D];
  }
}

/** The place of an array in the file of arrays. */
export interface Place<D extends Dtype> {
  dtype: D;
  offset: number;
  shape: number[];
}

/** Return the error that a function throws. */
export function errorOf(call: () => unknown): Error {
  try {
    call();
  } catch (error) {
    return error as Error;
  }
  throw new Error("it did not throw");
}
